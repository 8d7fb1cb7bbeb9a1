"""What `layers` raises."""


class ModelConfigError(ValueError):
    """A model's configuration is missing something, contradicts itself, or cannot be run; the message names the key."""


class UnsupportedModelError(ModelConfigError):
    """The architecture is not one of those known; the message lists them."""


class ShardError(ModelConfigError):
    """A dimension cannot be cut as asked; the message holds both numbers."""


class WeightError(ValueError):
    """A checkpoint's tensors do not fill the model's parameters; the message names every one of them."""


class LogitsError(ValueError):
    """The logits are not numbers that a token can be chosen by; the message says what they hold."""

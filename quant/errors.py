"""What `quant` raises."""


class QuantError(ValueError):
    """A scheme, a shape or a quantization option that cannot work; the message names what was asked and found."""

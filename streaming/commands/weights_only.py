"""Commands that write weights: options that only a run of the model has use for are refused. [no-torch]"""

from __future__ import annotations

from streaming.errors import OptionError
from streaming.options import LoadOptions

_OF_RUNS = ("kv_cache_dtype", "activation_dtype", "kernels", "moe_load")  # no checkpoint holds what these say


def check_weights_only(asked: LoadOptions, *, command: str) -> None:
    """Refuse what would not be in what `command` writes. Raises OptionError."""
    for name in _OF_RUNS:
        if (value := getattr(asked, name)) != LoadOptions.__dataclass_fields__[name].default:
            raise OptionError(
                f"--{name.replace('_', '-')} {value}: {command} writes weights, which this does not change; give it to "
                "the command that runs the model"
            )

"""Settings of a quantization_config, each under any of the names that writers give it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quant.errors import QuantError
from quant.module_patterns import check_patterns

LARGEST = 1 << 30  # of any size of a group or block: far beyond every real one, and products of two are counted still
_SHOWN = 80  # characters of a setting that a message repeats


def stated(config: Mapping[str, Any], *names: str) -> Any:
    """The first of the settings that is there and not null; None where none is."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def whole_number(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """A setting that must be a whole number. Raises QuantError for another, or for none without a default."""
    found = stated(config, *names)
    if found is None:
        found = default
    if type(found) is not int:
        shown = "is missing" if found is None else f"{str(found)[:_SHOWN]!r} is no whole number"
        raise QuantError(f"{names[0]} {shown}")
    return found


def is_set(config: Mapping[str, Any], *names: str) -> bool:
    """A setting that is true or false, and false where it is not there. Raises QuantError for another."""
    found = stated(config, *names)
    if found is not None and type(found) is not bool:
        raise QuantError(f"{names[0]} {str(found)[:_SHOWN]!r} is neither true nor false")
    return bool(found)


def word(config: Mapping[str, Any], *names: str, default: str) -> str:
    """A setting that is a word, in small letters. Raises QuantError for another."""
    found = stated(config, *names)
    if found is not None and (not isinstance(found, str) or len(found) > _SHOWN):
        raise QuantError(f"{names[0]} {str(found)[:_SHOWN]!r} is no word")
    return default if found is None else found.lower()


def ignored_modules(config: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    """Patterns of modules that are not quantized: the first of these settings that is there and not empty. Raises
    QuantError for what is no list of patterns."""
    name = next((name for name in names if config.get(name)), None)
    if name is None:
        return ()
    found = config[name]
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise QuantError(f"{name} {str(found)[:_SHOWN]!r}: a list of names is needed")
    return check_patterns(found)

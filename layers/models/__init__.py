"""The families: a file each, which translates configuration keys and weight names and defines no module.

To add one, write the file and name it in `layers.family_names`. Only the family that is asked for is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from layers.family_names import FAMILY_NAMES

if TYPE_CHECKING:
    from layers.family import Family

    FAMILIES: tuple[Family, ...]


def load_family(model_type: str) -> Family:
    """The family of this model_type, which is one of FAMILY_NAMES."""
    family: Family = import_module(f"layers.models.{model_type.removesuffix('_text')}").FAMILY
    return family


def __getattr__(name: str) -> Any:
    """FAMILIES: all of them, imported when that is asked for."""
    if name != "FAMILIES":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return tuple(map(load_family, FAMILY_NAMES))

"""Checkpoints as data: `open_checkpoint` finds a model's files and says, from headers alone, what lies where."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streaming.checkpoint.decode import decode_into, decode_rows, unpermute
    from streaming.checkpoint.formats import LOAD_FORMATS, open_checkpoint
    from streaming.checkpoint.location import locate
    from streaming.checkpoint.tensors import Checkpoint, Encoding, TensorInfo

__all__ = [
    "LOAD_FORMATS",
    "Checkpoint",
    "Encoding",
    "TensorInfo",
    "decode_into",
    "decode_rows",
    "locate",
    "open_checkpoint",
    "unpermute",
]

_HOME = {
    "LOAD_FORMATS": "formats",
    "open_checkpoint": "formats",
    "locate": "location",
    "Checkpoint": "tensors",
    "Encoding": "tensors",
    "TensorInfo": "tensors",
    "decode_into": "decode",
    "decode_rows": "decode",
    "unpermute": "decode",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: planning needs a part of it only."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

"""Numbers: how a weight is kept in few bytes, and the matmuls that read it. Importing this imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quant.dtypes import DType
    from quant.errors import QuantError
    from quant.kernels import KernelMode, Kernels
    from quant.scheme import Scheme, StoredSpec
    from quant.wide import Wide

_HOME = {
    "DType": "quant.dtypes",
    "KernelMode": "quant.kernels",
    "Kernels": "quant.kernels",
    "QuantError": "quant.errors",
    "Scheme": "quant.scheme",
    "StoredSpec": "quant.scheme",
    "Wide": "quant.wide",
}

__all__ = ["DType", "KernelMode", "Kernels", "QuantError", "Scheme", "StoredSpec", "Wide"]


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

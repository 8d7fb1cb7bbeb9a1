"""Numbers: how a weight is kept in few bytes, and the matmuls that read it. Importing this imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quant.cpu_features import CpuFeatures
    from quant.dtypes import DType
    from quant.errors import QuantError
    from quant.float8 import Fp8PerBlock, Fp8PerChannel, Fp8PerTensor
    from quant.int4 import IntPerGroup
    from quant.int8 import Int8PerChannel
    from quant.kernels import KernelMode, Kernels
    from quant.microscaling import MxFp4, MxFp8, NvFp4
    from quant.packed import PackedLinear, pack, packed_nbytes
    from quant.policy import QuantPolicy, Rule, default_policy
    from quant.registry import scheme_by_name, scheme_names
    from quant.scheme import Scheme, StoredSpec
    from quant.wide import Wide

_HOME = {
    "CpuFeatures": "quant.cpu_features",
    "DType": "quant.dtypes",
    "Fp8PerBlock": "quant.float8",
    "Fp8PerChannel": "quant.float8",
    "Fp8PerTensor": "quant.float8",
    "Int8PerChannel": "quant.int8",
    "IntPerGroup": "quant.int4",
    "KernelMode": "quant.kernels",
    "Kernels": "quant.kernels",
    "MxFp4": "quant.microscaling",
    "MxFp8": "quant.microscaling",
    "NvFp4": "quant.microscaling",
    "PackedLinear": "quant.packed",
    "QuantError": "quant.errors",
    "QuantPolicy": "quant.policy",
    "Rule": "quant.policy",
    "Scheme": "quant.scheme",
    "StoredSpec": "quant.scheme",
    "Wide": "quant.wide",
    "default_policy": "quant.policy",
    "pack": "quant.packed",
    "packed_nbytes": "quant.packed",
    "scheme_by_name": "quant.registry",
    "scheme_names": "quant.registry",
}

__all__ = [
    "CpuFeatures",
    "DType",
    "Fp8PerBlock",
    "Fp8PerChannel",
    "Fp8PerTensor",
    "Int8PerChannel",
    "IntPerGroup",
    "KernelMode",
    "Kernels",
    "MxFp4",
    "MxFp8",
    "NvFp4",
    "PackedLinear",
    "QuantError",
    "QuantPolicy",
    "Rule",
    "Scheme",
    "StoredSpec",
    "Wide",
    "default_policy",
    "pack",
    "packed_nbytes",
    "scheme_by_name",
    "scheme_names",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module when it is first asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

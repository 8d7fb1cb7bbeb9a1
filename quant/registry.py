"""Schemes by name, each imported when it is asked for. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from quant.errors import QuantError
from quant.scheme import Scheme

_HOMES: Mapping[str, tuple[str, str]] = MappingProxyType({
    "none": ("quant.wide", "Wide"),
    "fp8_per_tensor": ("quant.float8", "Fp8PerTensor"),
    "fp8_per_channel": ("quant.float8", "Fp8PerChannel"),
    "fp8_per_block": ("quant.float8", "Fp8PerBlock"),
    "int8_per_channel": ("quant.int8", "Int8PerChannel"),
})  # fmt: skip


def scheme_names() -> tuple[str, ...]:
    """Every name that `scheme_by_name` knows."""
    return tuple(_HOMES)


def scheme_by_name(name: str) -> Scheme:
    """The scheme that is called so; QuantError lists the known ones."""
    if name not in scheme_names():
        raise QuantError(f"quantization {name!r} is not known: choose one of {', '.join(scheme_names())}")
    module, scheme = _HOMES[name]
    found: Scheme = getattr(import_module(module), scheme)()
    return found

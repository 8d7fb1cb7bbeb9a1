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
    "int4_per_group": ("quant.int4", "IntPerGroup"),
    "mxfp8": ("quant.microscaling", "MxFp8"),
    "mxfp4": ("quant.microscaling", "MxFp4"),
    "nvfp4": ("quant.microscaling", "NvFp4"),
})  # fmt: skip

_WITH_SUFFIXES = frozenset({"int4_per_group"})


def scheme_names() -> tuple[str, ...]:
    """Every name that `scheme_by_name` knows, without suffixes."""
    return tuple(_HOMES)


def scheme_by_name(name: str) -> Scheme:
    """The scheme that is called so, such as "int4_per_group:64:asym"; QuantError lists the known ones, or suffixes."""
    base, *suffixes = name.split(":")
    if base not in scheme_names():
        raise QuantError(f"quantization {name!r} is not known: choose one of {', '.join(scheme_names())}")
    module, scheme = _HOMES[base]
    found: Scheme = getattr(import_module(module), scheme)()
    if not suffixes:
        return found
    if base not in _WITH_SUFFIXES:
        raise QuantError(f"quantization {name!r}: {base} takes nothing behind a colon")
    suffixed: Scheme = getattr(found, "with_suffixes")(tuple(suffixes))  # noqa: B009
    return suffixed

"""Schemes by name. Imports no torch."""

from __future__ import annotations

from quant.errors import QuantError
from quant.float8 import Fp8PerBlock, Fp8PerChannel, Fp8PerTensor
from quant.int8 import Int8PerChannel
from quant.scheme import Scheme
from quant.wide import Wide

SCHEMES: tuple[Scheme, ...] = (Wide(), Fp8PerTensor(), Fp8PerChannel(), Fp8PerBlock(), Int8PerChannel())


def scheme_names() -> tuple[str, ...]:
    """Every name that `scheme_by_name` knows."""
    return tuple(scheme.name for scheme in SCHEMES)


def scheme_by_name(name: str) -> Scheme:
    """The scheme that is called so; QuantError lists the known ones."""
    for scheme in SCHEMES:
        if scheme.name == name:
            return scheme
    raise QuantError(f"quantization {name!r} is not known: choose one of {', '.join(scheme_names())}")

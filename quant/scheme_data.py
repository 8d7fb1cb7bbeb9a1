"""Schemes as data for JSON files: {"class": "IntPerGroup", "bits": 4, ...}, and back. Imports no torch.

Such files may be a stranger's: only the classes of one table are made, only of their own fields, only with values that
a scheme can have. Fields that are not there have their defaults, where they have one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from types import MappingProxyType
from typing import Any

from quant.dtypes import DType
from quant.errors import QuantError
from quant.percentile import check_percentile
from quant.scheme import Scheme

_HOMES: Mapping[str, str] = MappingProxyType({
    "Wide": "quant.wide",
    "Fp8PerTensor": "quant.float8",
    "Fp8PerChannel": "quant.float8",
    "Fp8PerBlock": "quant.float8",
    "Int8PerChannel": "quant.int8",
    "IntPerGroup": "quant.int4",
    "MxFp8": "quant.microscaling",
    "MxFp4": "quant.microscaling",
    "NvFp4": "quant.microscaling",
    "Nf4": "quant.nf4",
})  # fmt: skip
MOST = 1 << 30  # of any whole number: far beyond every real group and block
MOST_LETTERS = 40  # of any word


def scheme_classes() -> tuple[str, ...]:
    """The classes that can be written and read."""
    return tuple(_HOMES)


def scheme_to_data(scheme: Scheme) -> dict[str, Any]:
    """The scheme's class and fields, as JSON has them. QuantError for one of a class that cannot be read back."""
    kind = type(scheme).__name__
    if kind not in _HOMES or type(scheme).__module__ != _HOMES[kind]:
        raise QuantError(f"schemes of the class {kind} cannot be saved")
    named: Any = scheme
    return {"class": kind, **{field.name: _plain(getattr(named, field.name)) for field in fields(named)}}


def _plain(value: object) -> object:
    if isinstance(value, DType):
        return value.value
    return list(value) if isinstance(value, tuple) else value


def scheme_from_data(raw: object) -> Scheme:
    """The scheme that such an object says. QuantError names what is wrong in it."""
    kind = raw.get("class") if isinstance(raw, Mapping) else None
    if not isinstance(raw, Mapping) or not isinstance(kind, str) or kind not in _HOMES:
        raise QuantError(f"a scheme is {str(raw)[:60]!r}: an object with one of the classes {', '.join(_HOMES)} needed")
    made: Any = getattr(import_module(_HOMES[kind]), kind)
    types = {field.name: str(field.type) for field in fields(made)}
    values = {}
    for name, value in raw.items():
        if name == "class":
            continue
        if name not in types:
            raise QuantError(f"a scheme of the class {kind} has no {str(name)[:40]!r}")
        try:
            values[name] = _READ[types[name]](value)
        except (KeyError, TypeError, ValueError):
            raise QuantError(f"{name} of a scheme of the class {kind} is {str(value)[:60]!r}") from None
    try:
        found: Scheme = made(**values)
    except TypeError:
        raise QuantError(f"a scheme of the class {kind} needs more than {', '.join(values) or 'nothing'}") from None
    return found


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise TypeError
    return value


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MOST:
        raise TypeError
    return value


def _word(value: object) -> str:
    if type(value) is not str or len(value) > MOST_LETTERS:
        raise TypeError
    return value


def _block(value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(map(_whole, value)):
        raise ValueError
    return value[0], value[1]


def _percentile(value: object) -> float | None:
    if value is not None and type(value) not in (int, float):
        raise TypeError
    check_percentile(value)
    return value  # type: ignore[return-value]  # what else it is, has just been refused


def _wide_dtype(value: object) -> DType:
    found = DType(value)
    if not found.is_wide:
        raise ValueError
    return found


_READ: Mapping[str, Callable[[object], object]] = MappingProxyType({
    "bool": _flag,
    "int": _whole,
    "str": _word,
    "tuple[int, int]": _block,
    "float | None": _percentile,
    "DType": _wide_dtype,
})  # fmt: skip

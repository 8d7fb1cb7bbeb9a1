"""What lies where in the data file: one line of the journal for each unit, each under a checksum. [no-torch]

    7a1c09f2 {"unit": "layers.3.qkv_proj", "checksum": 2774010935, "tensors": [["weight", "I8", [96, 64], 4096, 6144]]}

The number in front is the CRC-32 of what follows it, begun with that of the model's key: a line that is cut short, or
of another model, is none. Whoever can write here can make up a line with the right number, so nothing in it is believed
that could name bytes outside the file.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from quant.dtypes import DType, from_torch

if TYPE_CHECKING:
    import torch

UNIT_ALIGNMENT, TENSOR_ALIGNMENT = 4096, 64  # bytes; the file's own length is a multiple of the first
MOST_JOURNAL_NBYTES = 64 << 20  # the largest models have some 50,000 units of 200 bytes
_LONGEST_LINE, _LONGEST_NAME = 1 << 16, 1000
_MOST_TENSORS, _MOST_DIMS = 64, 8
_MOST_NBYTES = 1 << 48  # of one tensor, and of the file
_CRC_DIGITS = 8
_ITEMSIZE = MappingProxyType({dtype.value: dtype.itemsize for dtype in DType})


@dataclass(frozen=True)
class CachedTensor:
    """One stored tensor: `dtype` as safetensors names it; `offset` in the data file and `nbytes` in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class CachedUnit:
    """A unit's tensors, in the order in which they lie; `checksum`: CRC-32 of their bytes, one after the other."""

    name: str
    tensors: tuple[CachedTensor, ...]
    checksum: int = 0

    @property
    def start(self) -> int:
        """Where its first byte lies."""
        return self.tensors[0].offset

    @property
    def stop(self) -> int:
        """Where its last byte ends."""
        return self.tensors[-1].offset + self.tensors[-1].nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, without the gaps between them."""
        return sum(tensor.nbytes for tensor in self.tensors)


def aligned(offset: int, multiple: int = UNIT_ALIGNMENT) -> int:
    """The first multiple at or behind the offset."""
    return -(-offset // multiple) * multiple


def place(unit: str, tensors: Mapping[str, torch.Tensor], *, start: int) -> CachedUnit:
    """Where the tensors of a unit go, from `start` on. Raises ValueError for what no line can say."""
    placed, at = [], aligned(start)
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        placed.append(CachedTensor(name, from_torch(tensor.dtype).value, tuple(tensor.shape), at, nbytes))
        at = aligned(at + nbytes, TENSOR_ALIGNMENT)
    found = CachedUnit(unit, tuple(placed))
    if not placed or not _is_sound(found):
        raise ValueError(f"unit {unit[:100]!r} with {len(placed)} tensors cannot be kept in the cache")
    return found


def holds_same(unit: CachedUnit, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether the unit has just these tensors, by name, dtype and shape."""
    kept = {one.name: (one.dtype, one.shape) for one in unit.tensors}
    return kept == {name: (from_torch(one.dtype).value, tuple(one.shape)) for name, one in tensors.items()}


def journal_line(unit: CachedUnit, *, key_crc: int) -> bytes:
    """The unit's line."""
    tensors = [[one.name, one.dtype, list(one.shape), one.offset, one.nbytes] for one in unit.tensors]
    body = json.dumps({"unit": unit.name, "checksum": unit.checksum, "tensors": tensors}).encode()
    return b"%08x %s\n" % (zlib.crc32(body, key_crc), body)


def parse_journal(data: bytes, *, key_crc: int) -> tuple[list[CachedUnit], int]:
    """The units of the lines in front of the first that is none, and how many bytes those lines are."""
    units, stop = [], 0
    for end in _line_ends(data):
        unit = _parsed(data[stop : end - 1], key_crc)
        if unit is None:
            break
        units.append(unit)
        stop = end
    return units, stop


def _line_ends(data: bytes) -> Iterator[int]:
    at = 0
    while (found := data.find(b"\n", at, at + _LONGEST_LINE)) >= 0:
        at = found + 1
        yield at


def _parsed(line: bytes, key_crc: int) -> CachedUnit | None:
    crc, body = line[:_CRC_DIGITS], line[_CRC_DIGITS + 1 :]
    if crc != b"%08x" % zlib.crc32(body, key_crc):
        return None
    try:
        return _unit(json.loads(body))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _unit(raw: Any) -> CachedUnit | None:
    tensors = raw["tensors"]
    if type(raw["unit"]) is not str or type(raw["checksum"]) is not int or type(tensors) is not list:
        return None
    if not 0 < len(tensors) <= _MOST_TENSORS:
        return None
    found = tuple(CachedTensor(name, dtype, tuple(shape), at, nbytes) for name, dtype, shape, at, nbytes in tensors)
    unit = CachedUnit(raw["unit"], found, raw["checksum"])
    return unit if _is_sound(unit) else None


def _is_sound(unit: CachedUnit) -> bool:
    """Whether its tensors lie one after the other, each as long as its shape says."""
    if not 0 < len(unit.tensors) <= _MOST_TENSORS or not 0 < len(unit.name) <= _LONGEST_NAME:
        return False
    if not all(map(_is_sound_tensor, unit.tensors)) or len({one.name for one in unit.tensors}) < len(unit.tensors):
        return False
    ends = [0, *(one.offset + one.nbytes for one in unit.tensors)]
    in_order = all(one.offset >= end for one, end in zip(unit.tensors, ends, strict=False))
    return in_order and unit.start % UNIT_ALIGNMENT == 0 and unit.stop <= _MOST_NBYTES


def _is_sound_tensor(tensor: CachedTensor) -> bool:
    numbers = (*tensor.shape, tensor.offset, tensor.nbytes)
    if not all(type(number) is int and 0 <= number <= _MOST_NBYTES for number in numbers):
        return False
    if type(tensor.name) is not str or type(tensor.dtype) is not str or tensor.dtype not in _ITEMSIZE:
        return False
    if not 0 < len(tensor.name) <= _LONGEST_NAME or len(tensor.shape) > _MOST_DIMS:
        return False
    return tensor.offset % TENSOR_ALIGNMENT == 0 and tensor.nbytes == prod(tensor.shape) * _ITEMSIZE[tensor.dtype]

"""The safetensors header, parsed strictly: which bytes of the file are which tensor. [no-torch]

A file is an 8-byte little-endian length N, N bytes of JSON, and the data: name -> {dtype, shape, data_offsets}, the
offsets counted from the first data byte. The format's own rules (https://github.com/huggingface/safetensors#format)
are all checked here: no key twice, every range inside the file and exactly as long as shape and dtype say, no two
ranges overlapping, no byte that no tensor covers. So whoever reads by this header cannot read past anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from quant.dtypes import DType
from streaming.checkpoint.files import open_weights, read_exactly, strict_json
from streaming.checkpoint.report import Report
from streaming.checkpoint.tensors import MOST_TENSORS, TensorInfo
from streaming.errors import CheckpointFormatError

if TYPE_CHECKING:
    from streaming.checkpoint.remote_file import WeightFile

HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
_LENGTH_NBYTES = 8
_LARGEST = 2**63 - 1  # no file, and no tensor, can be larger
_KEYS = {"dtype", "shape", "data_offsets"}
_DTYPES: Mapping[str, DType] = MappingProxyType({dtype.value: dtype for dtype in DType if dtype.in_files})


def read_safetensors_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one file in the order of their bytes.

    Raises CheckpointFormatError with every problem of the header, each line naming the file and the tensor.
    """
    with open_weights(path) as (file, size):
        return parse_safetensors(path, size=size, read=partial(read_exactly, path, file))


def parse_safetensors(path: WeightFile, *, size: int, read: Callable[[int], bytes]) -> dict[str, TensorInfo]:
    """The same from anything that gives bytes: `size` in bytes, `read(n)` gives the next n. Raises likewise."""
    header_nbytes = _header_nbytes(path, read(min(size, _LENGTH_NBYTES)), size)
    text = read(header_nbytes)
    entries = _entries(path, text)
    report = Report(path)
    data_start = _LENGTH_NBYTES + header_nbytes
    infos = [_tensor(path, name, entry, data_start, report) for name, entry in entries.items()]
    tensors = sorted((info for info in infos if info is not None), key=lambda info: (info.offset, info.nbytes))
    if not report:  # a range that is wrong by itself would show a second time as a hole or an overlap
        _check_layout(path, tensors, data_start, size, report)
    report.raise_if_any()
    return {info.name: info for info in tensors}


def _header_nbytes(path: WeightFile, prefix: bytes, size: int) -> int:
    if len(prefix) < _LENGTH_NBYTES:
        raise CheckpointFormatError(f"{path}: is {size} bytes long; a safetensors file begins with an 8-byte length")
    nbytes = int.from_bytes(prefix, "little")
    if nbytes > HEADER_LIMIT:
        raise CheckpointFormatError(
            f"{path}: is not a safetensors file: its first 8 bytes give a header of {nbytes} bytes, "
            f"{HEADER_LIMIT} at most are possible"
        )
    if _LENGTH_NBYTES + nbytes > size:
        raise CheckpointFormatError(
            f"{path}: is cut short inside its header (truncated): it says {nbytes} bytes of header, "
            f"the file has {size} bytes in all"
        )
    return nbytes


def _entries(path: WeightFile, text: bytes) -> dict[str, Any]:
    try:
        if not text.startswith(b"{"):
            raise ValueError("it does not begin with {")
        entries = strict_json(text)
    except ValueError as error:
        raise CheckpointFormatError(f"{path}: its header is not valid: {error}") from error
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointFormatError(f"{path}: __metadata__ in its header is not an object of strings")
    assert isinstance(entries, dict)  # it began with {
    if len(entries) > MOST_TENSORS:
        raise CheckpointFormatError(f"{path}: has {len(entries):,} tensors; at most {MOST_TENSORS:,} are read")
    return entries


def _tensor(path: WeightFile, name: str, entry: Any, data_start: int, report: Report) -> TensorInfo | None:
    """One entry as a TensorInfo; None when it is wrong by itself, which is reported."""
    try:
        dtype, shape, (begin, end) = _dtype(entry), _shape(entry), _range(entry)
        expected = prod(shape) * dtype.itemsize
        if expected != end - begin:
            raise ValueError(
                f"shape {_short(list(shape))} of {dtype.value} needs {expected} bytes, "
                f"data_offsets [{begin}, {end}] hold {end - begin}"
            )
    except ValueError as error:
        report.add(f"{path}: tensor {name!r}: {error}", broken=True)
        return None
    return TensorInfo(name=name, shape=shape, dtype=dtype, file=path, offset=data_start + begin, nbytes=end - begin)


def _dtype(entry: Any) -> DType:
    if not isinstance(entry, dict) or entry.keys() != _KEYS:
        found = _short(sorted(entry)) if isinstance(entry, dict) else type(entry).__name__
        raise ValueError(f"its entry should have dtype, shape and data_offsets, found {found}")
    name = entry["dtype"]
    if name in ("F8_E4M3FNUZ", "F8_E5M2FNUZ"):
        raise ValueError(f"dtype {name}: codes of another 8-bit float than F8_E4M3, which can be read; convert it")
    if type(name) is not str or name not in _DTYPES:
        raise ValueError(f"unknown dtype {_short(name)}; known are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _shape(entry: dict[str, Any]) -> tuple[int, ...]:
    shape = entry["shape"]
    if not _are_counts(shape):
        raise ValueError(f"shape {_short(shape)} is not a list of sizes from 0 up")
    product = 1
    for dim in shape:
        product *= dim or 1
        if product > _LARGEST // 8:  # inside the loop: the product of a long list of large sizes takes forever
            raise ValueError(f"shape {_short(shape)} overflows: no file holds so many bytes")
    return tuple(shape)


def _range(entry: dict[str, Any]) -> tuple[int, int]:
    offsets = entry["data_offsets"]
    if not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"data_offsets {_short(offsets)} are not [begin, end]")
    begin, end = offsets
    if begin > end:
        raise ValueError(f"data_offsets [{begin}, {end}] end before they begin")
    return begin, end


def _are_counts(values: Any) -> bool:
    """Whether a JSON value is a list of whole numbers from 0 up; True and 1.0 are none."""
    if type(values) is not list:
        return False
    for value in values:  # noqa: SIM110 - a generator costs as much as the rest of the header
        if type(value) is not int or not 0 <= value <= _LARGEST:
            return False
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _check_layout(path: WeightFile, tensors: list[TensorInfo], data_start: int, size: int, report: Report) -> None:
    """Every data byte must belong to exactly one tensor; `tensors` are in the order of their bytes."""
    end, before = data_start, None
    for info in tensors:
        if info.offset < end:
            assert before is not None
            report.add(
                f"{path}: tensors {before.name!r} and {info.name!r} overlap: the first ends at data byte "
                f"{end - data_start}, the second begins at {info.offset - data_start}",
                broken=True,
            )
        elif info.offset > end:
            report.add(
                f"{path}: {info.offset - end} bytes before tensor {info.name!r} are not covered by any tensor "
                f"(data bytes {end - data_start} to {info.offset - data_start})",
                broken=True,
            )
        end, before = max(end, info.offset + info.nbytes), info
    if end > size:
        first = next(info for info in tensors if info.offset + info.nbytes > size)
        report.add(
            f"{path}: is cut short by {end - size} bytes (truncated): its header needs {end} bytes, the file has "
            f"{size}; the first tensor beyond the end is {first.name!r}; fetch the file again",
            broken=True,
        )
    elif end < size:
        report.add(
            f"{path}: {size - end} trailing bytes after the last tensor: its header covers {end} bytes, "
            f"the file has {size}",
            broken=True,
        )

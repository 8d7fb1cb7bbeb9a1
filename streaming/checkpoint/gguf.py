"""The GGUF header, versions 2 and 3, parsed strictly: metadata, and which bytes are which tensor. [no-torch]

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every length and count is checked against the bytes
that are left before anything is made of it, so a broken file costs no more than reading its header. Both byte orders
are read. Names and shapes stay GGUF's own here, but with dims outermost first, as everywhere else in this project.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from streaming.checkpoint.encodings import LITTLE_ENDIAN_ONLY, READABLE, type_name
from streaming.checkpoint.files import open_weights
from streaming.checkpoint.gguf_metadata import ARRAY, BOOL, SCALARS, STRING, ArraySpan, GgufMetadata, decode_text
from streaming.checkpoint.gguf_package import BY_PACKAGE, package_fault
from streaming.checkpoint.remote_file import WeightFile
from streaming.checkpoint.report import Report
from streaming.checkpoint.tensors import TensorInfo
from streaming.errors import CheckpointFormatError, OptionError

HEADER_LIMIT = 256 << 20  # bytes; the largest real headers (vocabularies of 256 k tokens) are below 16 MiB
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_READ = 1 << 20  # bytes of header read at a time
_LEAST_PAIR, _LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8  # bytes of the shortest possible entries


@dataclass(frozen=True)
class GgufHeader:
    """What one file says about itself, checked."""

    file: WeightFile
    big_endian: bool
    metadata: GgufMetadata
    tensors: Mapping[str, TensorInfo]  # by GGUF's names, in the file's order
    trailing_nbytes: int  # after the last tensor and its padding


@dataclass(frozen=True)
class _Entry:
    """A tensor as the header gives it."""

    name: str
    shape: tuple[int, ...]  # outermost first
    type_number: int
    offset: int  # from the start of the data


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse one file's header. Raises CheckpointFormatError naming the file, and the tensors that are wrong in it."""
    with open_weights(path) as (file, size):
        return parse_gguf(path, size=size, read=file.read)


def parse_gguf(path: WeightFile, *, size: int, read: Callable[[int], bytes]) -> GgufHeader:
    """The same from anything that gives bytes: `size` in bytes; `read(n)` gives the next bytes, n of them or fewer or
    more, and none only at the end. Raises likewise."""
    cursor = _Cursor(path, read, size)
    tensor_count, pair_count = _read_prefix(cursor)
    metadata = _read_metadata(cursor, pair_count)
    entries = _read_entries(cursor, tensor_count)
    alignment = _alignment(path, metadata)
    data_start = _padded(cursor.position, alignment)
    tensors, end = _locate(path, entries, data_start, alignment, size, big_endian=cursor.order == ">")
    return GgufHeader(
        file=path,
        big_endian=cursor.order == ">",
        metadata=GgufMetadata(metadata, cursor.header(), cursor.order),
        tensors=tensors,
        trailing_nbytes=max(0, size - _padded(end, alignment)),
    )


class _Cursor:
    """A place in the header. The file is read as far as the place has moved, in pieces."""

    def __init__(self, path: WeightFile, read: Callable[[int], bytes], size: int) -> None:
        self.path, self.size, self.position, self.order = path, size, 0, "<"
        self._read = read
        self._buffer = bytearray()

    def fault(self, problem: str) -> CheckpointFormatError:
        """An error about this file's header."""
        return CheckpointFormatError(f"{self.path}: {problem}")

    def number(self, code: str) -> Any:
        """The next number of struct's `code`."""
        layout = struct.Struct(self.order + code)
        start = self._advance(layout.size)
        return layout.unpack_from(self._buffer, start)[0]

    def raw(self, nbytes: int) -> bytes:
        """The next bytes as they are."""
        start = self._advance(nbytes)
        return bytes(self._buffer[start : self.position])

    def text(self) -> str:
        """The next string: a 64-bit length and as many bytes."""
        return decode_text(self.raw(self.number("Q")))

    def count(self, what: str, least_nbytes: int) -> int:
        """The next 64-bit count, checked: so many items of at least that size must fit into what is left."""
        found = self.number("Q")
        assert isinstance(found, int)
        if found * least_nbytes > self.size - self.position:
            raise self.fault(
                f"is cut short or broken: it says {found} {what} at byte {self.position}, "
                f"but only {self.size - self.position} bytes are left"
            )
        return found

    def skip(self, nbytes: int) -> None:
        """Step over bytes."""
        self._advance(nbytes)

    def skip_strings(self, count: int) -> None:
        """Step over strings: the one long loop here, so everything in it is local."""
        unpack, position, buffer = struct.Struct(self.order + "Q").unpack_from, self.position, self._buffer
        end = len(buffer)
        for _ in range(count):
            if position + 8 > end:
                end = self._fill(position + 8)
            position += 8 + unpack(buffer, position)[0]
        self._fill(position)
        self.position = position

    def header(self) -> bytes:
        """All bytes up to the place."""
        return bytes(self._buffer[: self.position])

    def _advance(self, nbytes: int) -> int:
        start = self.position
        self._fill(start + nbytes)
        self.position = start + nbytes
        return start

    def _fill(self, end: int) -> int:
        """Have the bytes up to `end` in the buffer; the buffer's length."""
        if end > self.size:
            raise self.fault(
                f"is cut short or broken (truncated): its header goes on to byte {end} at least, "
                f"the file has {self.size} bytes"
            )
        if end > HEADER_LIMIT:
            raise self.fault(f"its header goes on to byte {end} at least; at most {HEADER_LIMIT} are read")
        while len(self._buffer) < end:
            piece = self._read(max(end - len(self._buffer), _READ))
            if not piece:
                raise self.fault(f"ended at byte {len(self._buffer)}: it changed while it was read")
            self._buffer += piece
        return len(self._buffer)


def _read_prefix(cursor: _Cursor) -> tuple[int, int]:
    """Number of tensors and of metadata pairs; sets the byte order."""
    magic = cursor.raw(4)
    if magic != _MAGIC:
        raise cursor.fault(f"is not a GGUF file: it begins with {magic!r}, not {_MAGIC!r}")
    version = cursor.number("I")
    if version & 0xFFFF == 0:  # a small number in the other byte order
        cursor.order = ">"
        version = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in _VERSIONS:
        raise cursor.fault(f"is GGUF version {version}; versions 2 and 3 can be read: convert it again")
    tensor_count = cursor.count("tensors", _LEAST_TENSOR)
    return tensor_count, cursor.count("metadata pairs", _LEAST_PAIR)


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text()
        if key in values:
            raise cursor.fault(f"duplicate metadata key {key!r}")
        values[key] = _read_value(cursor, key)
    return values


def _read_value(cursor: _Cursor, key: str) -> Any:
    value_type = cursor.number("I")
    if value_type == STRING:
        return cursor.text()
    if value_type == ARRAY:
        return _read_array(cursor, key)
    value = cursor.number(_scalar_code(cursor, key, value_type))
    return bool(value) if value_type == BOOL else value


def _read_array(cursor: _Cursor, key: str) -> ArraySpan:
    item_type = cursor.number("I")
    if item_type == STRING:
        count = cursor.count(f"strings in {key!r}", 8)
        span = ArraySpan(item_type, count, cursor.position)
        cursor.skip_strings(count)
        return span
    item_nbytes = struct.calcsize(f"<{_scalar_code(cursor, key, item_type)}")
    count = cursor.count(f"items in {key!r}", item_nbytes)
    span = ArraySpan(item_type, count, cursor.position)
    cursor.skip(count * item_nbytes)
    return span


def _scalar_code(cursor: _Cursor, key: str, value_type: int) -> str:
    code = SCALARS.get(value_type)
    if code is None:
        raise cursor.fault(f"metadata key {key!r} has the unknown value type {value_type}")
    return code


def _read_entries(cursor: _Cursor, count: int) -> list[_Entry]:
    entries = []
    for _ in range(count):
        name, n_dims = cursor.text(), cursor.number("I")
        if not 1 <= n_dims <= _MAX_DIMS:
            raise cursor.fault(f"tensor {name!r} has {n_dims} dims; 1 to {_MAX_DIMS} are possible")
        dims = tuple(cursor.number("Q") for _ in range(n_dims))
        entries.append(_Entry(name, dims[::-1], cursor.number("I"), cursor.number("Q")))
    return entries


def _alignment(path: WeightFile, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise CheckpointFormatError(f"{path}: general.alignment is {alignment!r}, not a power of two")
    return alignment


def _padded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def _locate(
    path: WeightFile, entries: list[_Entry], data_start: int, alignment: int, size: int, *, big_endian: bool
) -> tuple[dict[str, TensorInfo], int]:
    """The tensors with their bytes, and where the last of them ends. Raises with every wrong one."""
    report = Report(path)
    _check_types(path, entries, report, big_endian=big_endian)
    tensors: dict[str, TensorInfo] = {}
    for entry in entries:
        if entry.type_number not in READABLE:
            continue
        if entry.name in tensors:
            report.add(f"{path}: duplicate tensor {entry.name!r}: it is given twice", broken=True)
        try:
            tensors[entry.name] = _tensor(path, entry, data_start, big_endian=big_endian)
        except ValueError as error:
            report.add(f"{path}: tensor {entry.name!r}: {error}", broken=True)
    end = data_start
    if not report:  # ranges can be laid end to end only when each is right by itself
        end = _check_layout(path, tensors, data_start, alignment, size, report)
    report.raise_if_any()
    _require_package(path, entries)
    return tensors, end


def _check_types(path: WeightFile, entries: list[_Entry], report: Report, *, big_endian: bool) -> None:
    """One line for each type that cannot be decoded."""
    by_type: dict[int, list[str]] = {}
    for entry in entries:
        by_type.setdefault(entry.type_number, []).append(entry.name)
    for number, names in by_type.items():
        if fault := _type_fault(number, big_endian=big_endian):
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            report.add(f"{path}: tensor {names[0]!r}{others}: type {type_name(number)} {fault}", broken=True)


def _type_fault(number: int, *, big_endian: bool) -> str | None:
    if number not in READABLE:
        return f"cannot be decoded; known are {', '.join(known.name for known in READABLE.values())}"
    name = READABLE[number].name
    if big_endian and name in LITTLE_ENDIAN_ONLY:
        return "is not defined in a big-endian file; convert the model to a little-endian one"
    return None


def _require_package(path: WeightFile, entries: list[_Entry]) -> None:
    """OptionError where a package has to decode a tensor and is not installed."""
    for entry in entries:
        if READABLE[entry.type_number].name in BY_PACKAGE and (fault := package_fault()):
            raise OptionError(f"{path}: tensor {entry.name!r}: type {type_name(entry.type_number)} {fault}")


def _tensor(path: WeightFile, entry: _Entry, data_start: int, *, big_endian: bool) -> TensorInfo:
    kind = READABLE[entry.type_number]
    if not all(entry.shape):
        raise ValueError(f"shape {list(entry.shape)} has a dim of size 0")
    if entry.shape[-1] % kind.block_values:
        raise ValueError(
            f"rows of {entry.shape[-1]} values are not a whole number of {kind.name} blocks of {kind.block_values}"
        )
    if kind.encoding and len(entry.shape) == 1:
        raise ValueError(f"has one dim and type {kind.name}; vectors are F32, F16 or BF16")
    return TensorInfo(
        name=entry.name,
        shape=entry.shape,
        dtype=kind.dtype,
        file=path,
        offset=data_start + entry.offset,
        nbytes=prod(entry.shape) // kind.block_values * kind.block_nbytes,
        encoding=kind.encoding,
        big_endian=big_endian,
    )


def _check_layout(
    path: WeightFile, tensors: Mapping[str, TensorInfo], data_start: int, alignment: int, size: int, report: Report
) -> int:
    """Each tensor must begin where the one before it, padded, ends: no overlap, no gap. The end of the last one."""
    end = data_start
    for info in sorted(tensors.values(), key=lambda info: info.offset):
        expected = _padded(end, alignment)
        if info.offset != expected:
            report.add(
                f"{path}: tensor {info.name!r} has offset {info.offset - data_start}, but the tensors before it end "
                f"at {expected - data_start} (an overlap or a gap)",
                broken=True,
            )
        end = info.offset + info.nbytes
        if end > size:  # and so are all that follow
            report.add(
                f"{path}: is cut short (truncated): tensor {info.name!r} ends at byte {end}, the file has {size}; "
                "fetch the file again",
                broken=True,
            )
            break
    return end

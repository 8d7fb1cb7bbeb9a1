"""CoreWeave tensorizer's own format: which bytes of a `.tensors` file are which tensor. [no-torch]

A file is the mark |TZR|, a version (u32), 32 bytes of feature flags, two sizes and the number of tensors (u64 each),
then the length (u64) of the index and the index itself: for each tensor name, kind, dtype, shape, where its own header
and its data lie, and how many bytes the data are. All numbers are little endian (tensorizer/serialization.py, data
versions 1 to 5). The bytes are the numbers, uncompressed; so they are read like any other file's, and the package
itself is needed only to write such files. Encrypted ones are refused, and checksums are not looked at.
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path

from quant.dtypes import DType
from streaming.checkpoint.files import open_weights, read_exactly
from streaming.checkpoint.report import Report
from streaming.checkpoint.tensors import MOST_TENSORS, TensorInfo
from streaming.errors import CheckpointFormatError

_MARK = b"|TZR|"
_HEAD = struct.Struct("<I32sQ8xQ")  # version, flags, size (unused), number of tensors
_VERSIONS = range(1, 6)
_ENCRYPTED, _VERSIONED = 1, 2  # feature flags, from version 4 on
_ONLY_ENCRYPTED = 3  # the version that has no flags and is always encrypted
_LONG_SHAPES = 5  # the entry's version from which dims are 64 bits
_INDEX_LIMIT = 100 << 20
_LARGEST = 2**63 - 1
_MOST_DIMS = 16
_NUMPY = {
    "f2": DType.F16, "f4": DType.F32, "f8": DType.F64, "i1": DType.I8, "i2": DType.I16, "i4": DType.I32,
    "i8": DType.I64, "u1": DType.U8, "b1": DType.BOOL,
}  # fmt: skip


def read_tensorizer_header(path: Path) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """The tensors of one file, and notes for the user (none). Raises CheckpointFormatError naming file and tensor."""
    with open_weights(path) as (file, size):
        start = read_exactly(path, file, min(size, len(_MARK) + _HEAD.size + 8))
        if not start.startswith(_MARK):
            raise CheckpointFormatError(f"{path}: is not a tensorizer file: it does not begin with {_MARK.decode()}")
        if len(start) < len(_MARK) + _HEAD.size + 8:
            raise CheckpointFormatError(f"{path}: is cut short inside its header (truncated)")
        version, flag_bytes, _, count = _HEAD.unpack_from(start, len(_MARK))
        flags = _checked_flags(path, version, flag_bytes)
        nbytes = int.from_bytes(start[-8:], "little")
        if nbytes > min(_INDEX_LIMIT, size - len(start)):
            raise CheckpointFormatError(f"{path}: is cut short: its index of {nbytes:,} bytes does not fit into it")
        index = _Index(path, read_exactly(path, file, nbytes), versioned=bool(flags & _VERSIONED))
    if count > MOST_TENSORS:
        raise CheckpointFormatError(f"{path}: says it has {count:,} tensors; at most {MOST_TENSORS:,} are read")
    report = Report(path)
    found: dict[str, TensorInfo] = {}
    for _ in range(count):  # an index that ends before raises: the count is no reason to go on
        info = index.next_tensor(size, report)
        if info is not None and found.setdefault(info.name, info) is not info:
            report.add(f"{path}: tensor {info.name!r} is there twice", broken=True)
    report.raise_if_any()
    return dict(sorted(found.items(), key=lambda pair: pair[1].offset)), ()


def _checked_flags(path: Path, version: int, flag_bytes: bytes) -> int:
    if version not in _VERSIONS:
        raise CheckpointFormatError(f"{path}: is of tensorizer's data version {version}; 1 to 5 are known")
    flags = int.from_bytes(flag_bytes, "little") if version > _ONLY_ENCRYPTED else 0
    if version == _ONLY_ENCRYPTED or flags & _ENCRYPTED:
        raise CheckpointFormatError(f"{path}: is encrypted; decrypt it with tensorizer and serialize it again")
    if flags & ~(_ENCRYPTED | _VERSIONED):
        raise CheckpointFormatError(f"{path}: has feature flags ({flags:#x}) that are not known")
    return flags


class _Index:
    """The index, entry after entry; what lies beyond its end is an error."""

    def __init__(self, path: Path, data: bytes, *, versioned: bool) -> None:
        self._path, self._data, self._versioned, self._at = path, data, versioned, 0

    def next_tensor(self, size: int, report: Report) -> TensorInfo | None:
        """The next entry's tensor; None, and a line in the report, where it cannot be one."""
        try:
            version = self._take("<I")[0] if self._versioned else 1
            name = self._bytes("<H").decode("utf-8")
            self._take("<B")  # parameter, buffer or entry of a state dict: all the same here
            dtype_name = self._bytes("<B").decode("utf-8")
            dims = self._take("<B")[0]
            shape = self._take(f"<{dims}{'Q' if version >= _LONG_SHAPES else 'I'}")
            _, offset, nbytes = self._take("<3Q")
        except (struct.error, UnicodeDecodeError) as error:
            raise CheckpointFormatError(f"{self._path}: its index is broken ({error})") from None
        if fault := self._fault(name, dtype_name, shape, offset, nbytes, size):
            report.add(f"{self._path}: tensor {name!r} {fault}", broken=True)
            return None
        dtype = dtype_of(dtype_name)
        assert dtype is not None
        return TensorInfo(name, shape, dtype, self._path, offset, nbytes)

    def _fault(self, name: str, dtype_name: str, shape: tuple[int, ...], offset: int, nbytes: int, size: int) -> str:
        dtype = dtype_of(dtype_name)
        if name.startswith("\x1e"):
            return "has a path of several steps for a name; serialize a flat state dict or a module"
        if dtype is None:
            return f"has dtype {dtype_name!r}, which is not known"
        wanted = prod(shape) * dtype.itemsize
        if len(shape) > _MOST_DIMS or wanted > _LARGEST:
            return f"has a shape of {len(shape)} dims that cannot be"
        if nbytes == 0 and wanted:
            return "was saved without data (a meta tensor)"
        if nbytes != wanted:
            return f"has {nbytes:,} bytes, but shape {list(shape)} of {dtype.torch_name} takes {wanted:,}"
        if offset + nbytes > size:
            return f"ends at byte {offset + nbytes:,}, but the file has {size:,} (truncated)"
        return ""

    def _take(self, form: str) -> tuple[int, ...]:
        found = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found

    def _bytes(self, length_form: str) -> bytes:
        (length,) = self._take(length_form)
        (found,) = struct.unpack_from(f"<{length}s", self._data, self._at)
        self._at += length
        return bytes(found)


def dtype_of(name: str) -> DType | None:
    """The dtype of numpy's name ("<f4"), or of "storage dtype, NUL, torch's name" where numpy has none."""
    _, opaque, torch_name = name.partition("\0")
    if opaque:
        return next((dtype for dtype in DType if dtype.in_files and f"torch.{dtype.torch_name}" == torch_name), None)
    return _NUMPY.get(name.lstrip("<|="))

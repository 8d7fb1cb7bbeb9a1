"""PyTorch's own files (.bin, .pt, .pth), read without PyTorch: which bytes of the file are which tensor. [no-torch]

torch.save writes a pickle that describes tensors, and their storages as they are: in a zip archive since 1.6
(`pt_zip`), one after the other before (`pt_legacy`). Nothing is unpickled by Python (`pickle_reader`). A tensor is a
view: its numbers may lie in any order, and two tensors may share a storage.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from io import BytesIO, FileIO
from math import prod
from pathlib import Path

from streaming.checkpoint.file_content import GGUF_FILE, LEGACY, SAFETENSORS_FILE, TAR, ZIP, kind_of
from streaming.checkpoint.files import open_weights
from streaming.checkpoint.pickle_reader import PICKLE_LIMIT, read_pickle
from streaming.checkpoint.pt_legacy import read_legacy
from streaming.checkpoint.pt_objects import StoredTensor
from streaming.checkpoint.pt_zip import Member, read_members
from streaming.checkpoint.report import Report
from streaming.checkpoint.tensors import TensorInfo
from streaming.errors import CheckpointFormatError

_REPEATS = 16 << 20  # bytes that a tensor may always have, however few of them are in the file
_BYTE_ORDERS = {b"little": False, b"big": True}


def read_pickle_header(path: Path) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """The tensors of one file, and notes for the user.

    The file holds a dict of tensors, or a dict with one such dict in it, which a note names; other entries are left
    out. Raises CheckpointFormatError with every problem, each line naming the file: another kind of file, a pickle that
    asks for anything but plain tensors, ranges outside the file, compressed members.
    """
    with open_weights(path) as (file, size):
        kind = kind_of(os.pread(file.fileno(), 512, 0), size)
        if kind == ZIP:
            saved, members, big_endian = _read_zip(path, file, size)
        elif kind == LEGACY:
            (saved, members), big_endian = read_legacy(path, file, size), False
        else:
            raise CheckpointFormatError(f"{path}: {_OTHER[kind]}")
    found, notes = _tensors_of(path, saved)
    report = Report(path)
    tensors = {}
    for name, stored in found.items():
        try:
            tensors[name] = _place(path, name, stored, members, size=size, big_endian=big_endian)
        except ValueError as error:
            report.add(f"{path}: tensor {name!r}: {error}", broken=True)
    report.raise_if_any()
    return tensors, notes


def _read_zip(path: Path, file: FileIO, size: int) -> tuple[object, dict[str, Member], bool]:
    """The saved object, the bytes of each storage by key, and whether their numbers are big-endian."""
    members = read_members(path, file, size)
    pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise CheckpointFormatError(f"{path}: is a zip archive, but not of torch.save: it has {len(pickles)} data.pkl")
    prefix = pickles[0].removesuffix("data.pkl")
    if prefix + "constants.pkl" in members:
        raise CheckpointFormatError(f"{path}: is a TorchScript program, not a dict of tensors")
    pickle = members[pickles[0]]
    if pickle.nbytes > PICKLE_LIMIT:
        raise CheckpointFormatError(f"{path}: its pickle has {pickle.nbytes} bytes, at most {PICKLE_LIMIT} are read")
    order = _small(file, members.get(prefix + "byteorder")) or b"little"
    if order not in _BYTE_ORDERS:
        raise CheckpointFormatError(f"{path}: its byteorder is {order!r}, neither little nor big")
    try:
        saved = read_pickle(BytesIO(os.pread(file.fileno(), pickle.nbytes, pickle.offset)))
    except ValueError as error:
        raise CheckpointFormatError(f"{path}: {error}") from error
    data = prefix + "data/"
    storages = {name.removeprefix(data): member for name, member in members.items() if name.startswith(data)}
    return saved, storages, _BYTE_ORDERS[order]


def _small(file: FileIO, member: Member | None) -> bytes:
    return b"" if member is None else os.pread(file.fileno(), min(member.nbytes, 16), member.offset)


def _tensors_of(path: Path, saved: object) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """The dict of tensors: what was saved, or the only dict in it that holds some."""
    if not isinstance(saved, dict):
        raise CheckpointFormatError(f"{path}: holds a {_kind_word(saved)}, not a dict of tensors")
    if direct := _own_tensors(path, saved):
        return direct, ()
    nested = {
        str(key): own for key, inner in saved.items() if isinstance(inner, dict) if (own := _own_tensors(path, inner))
    }
    if not nested:
        raise CheckpointFormatError(f"{path}: holds no tensors (looked for a dict of them, or one in a dict)")
    if len(nested) > 1:
        raise CheckpointFormatError(
            f"{path}: holds {len(nested)} dicts of tensors, {', '.join(sorted(nested))[:200]}: which is the model is "
            "not said; save that one alone"
        )
    ((name, tensors),) = nested.items()
    return tensors, (f"{path.name}: the tensors are those of its entry {name!r}",)


def _own_tensors(path: Path, found: Mapping[object, object]) -> dict[str, StoredTensor]:
    tensors = {key: value for key, value in found.items() if isinstance(key, str) and isinstance(value, StoredTensor)}
    for name in tensors:
        if not name.isascii() and name.encode("utf-8", "replace").decode() != name:
            raise CheckpointFormatError(f"{path}: a tensor's name, {name!r}, is no valid text")
    return tensors


def _kind_word(value: object) -> str:
    return "tensor" if isinstance(value, StoredTensor) else type(value).__name__.lower()


def _place(
    path: Path, name: str, stored: StoredTensor, members: Mapping[str, Member], *, size: int, big_endian: bool
) -> TensorInfo:
    """Which bytes a view covers. ValueError where its storage is missing, of another size, or too small for it."""
    storage, itemsize = stored.storage, stored.dtype.itemsize
    member = members.get(storage.key)
    if member is None:
        raise ValueError(f"its storage {storage.key[:40]!r} is not in the file")
    if member.nbytes != storage.nbytes:
        raise ValueError(f"its storage should have {storage.nbytes} bytes, the file has {member.nbytes}")
    span = _span(stored)
    end = (stored.offset + span) * itemsize
    if span and end > storage.nbytes:
        raise ValueError(f"needs {end} bytes of its storage, which has {storage.nbytes}")
    if (repeated := prod(stored.shape) * itemsize) > max(size, _REPEATS):
        raise ValueError(f"repeats few numbers to {repeated} bytes, more than its whole file has ({size})")
    return TensorInfo(
        name=name, shape=stored.shape, dtype=stored.dtype, file=path,
        offset=member.offset + (stored.offset * itemsize if span else 0), nbytes=span * itemsize,
        big_endian=big_endian and itemsize > 1, strides=None if _is_contiguous(stored) else stored.strides,
    )  # fmt: skip


def _span(stored: StoredTensor) -> int:
    """Elements from the view's first to its last."""
    if 0 in stored.shape:
        return 0
    return 1 + sum((dim - 1) * stride for dim, stride in zip(stored.shape, stored.strides, strict=True))


def _is_contiguous(stored: StoredTensor) -> bool:
    """Whether numbers lie row after row; the stride of a dim of one is of no meaning."""
    expected = 1
    for dim, stride in zip(reversed(stored.shape), reversed(stored.strides), strict=True):
        if dim != 1 and stride != expected:
            return 0 in stored.shape
        expected *= dim
    return True


_OTHER = {
    SAFETENSORS_FILE: "is a safetensors file by its content, not one of torch.save; rename it to .safetensors",
    GGUF_FILE: "is a GGUF file by its content, not one of torch.save; rename it to .gguf",
    TAR: "is a tar archive as PyTorch before 0.1.10 wrote it, which is not supported; save it again",
    None: "is not a file of torch.save: it begins neither as its zip archive nor with its magic number",
}

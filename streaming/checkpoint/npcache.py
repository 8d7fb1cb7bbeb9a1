"""`--load-format npcache`: the tensors of .bin files once more as raw arrays, for the next loads. [no-torch]

The cache is one safetensors file in the folder `.npcache` inside the model's folder: its arrays lie row after row in
this machine's order, whatever the .bin files hold. Its name is made of the size and the time of every .bin file, so a
changed one never finds an old cache. It is written under another name and renamed when all of it is on disk, by the one
process that holds the lock file; processes that come meanwhile read the .bin files.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from streaming.checkpoint.files import open_weights, read_exactly, states_before
from streaming.checkpoint.remote_file import WeightFile
from streaming.checkpoint.safetensors import read_safetensors_header
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.errors import CheckpointError

FOLDER, LOCK = ".npcache", "lock"
_COPY_NBYTES = 8 << 20
_MOST_TIMES, _ALWAYS_NBYTES = 4, 64 << 20  # a cache larger than the files: tied tensors are written once for each name
_RESERVED = "__metadata__"  # is no tensor in a safetensors header
_WORD = 24  # letters of the word that stands for the .bin files


def open_cached(checkpoint: Checkpoint) -> Checkpoint:
    """The same tensors, read from the cache, which is written first where there is none for these files as they are.

    Raises CheckpointError where it cannot be written (no permission, the disk is full); nothing half-written stays.
    """
    root = checkpoint.root
    if _RESERVED in checkpoint.tensors:
        file = checkpoint.tensors[_RESERVED].file
        raise CheckpointError(
            f"{file}: a tensor is called {_RESERVED!r}, which no cache can hold; use --load-format hf"
        )
    folder = (root if root.is_dir() else root.parent) / FOLDER
    cache = folder / f"{_label(root)}-{_fingerprint(checkpoint.files)}.safetensors"
    _check_size(checkpoint)
    try:
        if not _holds(cache, checkpoint.tensors) and not _write_alone(cache, checkpoint):
            note = f"another process writes the cache {cache}; this load reads the .bin files"
            return replace(checkpoint, format="npcache", notes=(*checkpoint.notes, note))
    except OSError as error:
        raise CheckpointError(
            f"{folder}: the cache for --load-format npcache cannot be written: {error.strerror or error} "
            f"(it needs {_needed(checkpoint.tensors)} bytes there); nothing of it was kept; --load-format hf needs none"
        ) from error
    states = states_before([cache])
    tensors = read_safetensors_header(cache)
    return replace(checkpoint, format="npcache", tensors=tensors, files=(cache,), states=states)


def _label(root: Path) -> str:
    """What a cache is of: the folder's model, or one file."""
    return "model" if root.is_dir() else root.name


def _fingerprint(files: tuple[WeightFile, ...]) -> str:
    """A word for the files' names, sizes and times."""
    facts = [(file.name, (status := os.stat(str(file))).st_size, status.st_mtime_ns) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:_WORD]


def _check_size(checkpoint: Checkpoint) -> None:
    """Refuse tensors that repeat few numbers (a stride of 0): a small file could fill the disk."""
    needed, there = _needed(checkpoint.tensors), sum(os.stat(str(file)).st_size for file in checkpoint.files)
    if needed > _MOST_TIMES * there + _ALWAYS_NBYTES:
        raise CheckpointError(
            f"{checkpoint.root}: its tensors repeat few numbers: their cache would take {needed:,} bytes where the "
            f"files have {there:,}; --load-format hf needs none"
        )


def _needed(tensors: Mapping[str, TensorInfo]) -> int:
    return sum(info.numel * info.dtype.itemsize for info in tensors.values())


def _holds(cache: Path, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether the cache is there with exactly these tensors; one that is not what it should be is written again."""
    if not cache.is_file():
        return False
    try:
        found = read_safetensors_header(cache)
    except CheckpointError:
        return False
    return _facts(found) == _facts(tensors)


def _facts(tensors: Mapping[str, TensorInfo]) -> dict[str, tuple[object, ...]]:
    return {name: (info.shape, info.dtype) for name, info in tensors.items()}


def _write_alone(cache: Path, checkpoint: Checkpoint) -> bool:
    """Write the cache; False where another process is at it. Links that a stranger's folder holds are not followed."""
    if cache.parent.is_symlink():
        raise CheckpointError(f"{cache.parent}: is a link; the cache for --load-format npcache is a folder of its own")
    cache.parent.mkdir(exist_ok=True)
    with _lock(cache.parent / LOCK) as held:
        if held and not _holds(cache, checkpoint.tensors):  # the other one may have finished meanwhile
            _remove_others(cache)
            _write(cache, checkpoint)
        return held


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Whether the lock was free; the system gives it back when its holder ends, however it ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(descriptor)


def _remove_others(cache: Path) -> None:
    """Caches of the same model from before its files changed, and what a process left that was ended while writing."""
    label = re.escape(cache.name.rpartition("-")[0])
    for name in os.listdir(cache.parent):
        if re.fullmatch(rf"{label}-[0-9a-f]{{{_WORD}}}\.safetensors(\.unfinished)?", name):
            (cache.parent / name).unlink()


def _write(cache: Path, checkpoint: Checkpoint) -> None:
    unfinished = cache.with_name(cache.name + ".unfinished")
    try:
        with open(unfinished, "xb") as out:
            out.write(_header(checkpoint.tensors))
            for info in checkpoint.tensors.values():
                for part in _raw(info):
                    out.write(part)
            out.flush()
            os.fsync(out.fileno())
        if _fingerprint(checkpoint.files) not in cache.name:
            raise CheckpointError(f"{checkpoint.root}: its .bin files changed while their cache was written; try again")
        os.replace(unfinished, cache)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _header(tensors: Mapping[str, TensorInfo]) -> bytes:
    """The safetensors header of the tensors in their order."""
    entries, at = {}, 0
    for name, info in tensors.items():
        end = at + info.numel * info.dtype.itemsize
        entries[name] = {"dtype": info.dtype.value, "shape": list(info.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % 64)  # so that the first array begins at a multiple of 64
    return len(text).to_bytes(8, "little") + text


def _raw(info: TensorInfo) -> Iterator[bytes | bytearray]:
    """A tensor's numbers row after row in this machine's order; in small parts where that is how they lie."""
    assert isinstance(info.file, Path)
    parts = _parts(info.file, info)
    if info.is_plain:
        yield from parts
    elif info.nbytes:
        yield _in_order(info, b"".join(parts))


def _parts(path: Path, info: TensorInfo) -> Iterator[bytes]:
    with open_weights(path) as (file, _):
        file.seek(info.offset)
        for start in range(0, info.nbytes, _COPY_NBYTES):
            yield read_exactly(path, file, min(_COPY_NBYTES, info.nbytes - start))


def _in_order(info: TensorInfo, raw: bytes) -> bytearray:
    """The same numbers of a view or of another byte order: rare, so torch is imported for these alone."""
    import torch

    from quant.dtypes import to_torch
    from streaming.checkpoint.decode import decode_into

    whole = info if info.shape else replace(info, shape=(1,))
    numbers = bytearray(whole.numel * whole.dtype.itemsize)
    decode_into(whole, raw, torch.frombuffer(numbers, dtype=to_torch(whole.dtype)).view(whole.shape), first_row=0)
    return numbers

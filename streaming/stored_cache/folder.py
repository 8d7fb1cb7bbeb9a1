"""One model's folder in the cache, opened: what is whole in it, and whether this process may write. [no-torch]

Who opens it alone cuts off what a killed writer left behind the last whole line and the last whole unit. Where others
have it open, nothing is cut: they may have read the bytes there already, and must not find others in their place.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
import zlib
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from streaming.stored_cache.eviction import (
    DATA,
    IN_USE,
    JOURNAL,
    KEY,
    NEW_KEY,
    WRITER,
    is_at,
    open_folder_descriptor,
    open_plain,
)
from streaming.stored_cache.journal import MOST_JOURNAL_NBYTES, CachedUnit, aligned, parse_journal

_TRIES, _PAUSE_S = 1000, 0.005  # while another process opens or removes the folder: 40 us a unit
_PIECE = 1 << 20


@dataclass
class ModelFolder:
    """Descriptors of a model's files, until `close`. `end`: where the next unit goes; `writes`: the writer's lock is
    ours; `held_by_other`: it is another process's."""

    path: Path
    key_crc: int
    stack: ExitStack = field(repr=False)
    data: int = -1
    journal: int = -1
    journal_nbytes: int = 0
    end: int = 0
    writes: bool = False
    held_by_other: bool = False
    units: dict[str, CachedUnit] = field(default_factory=dict)

    def close(self) -> None:
        """Close the files and give the locks back."""
        self.stack.close()


def open_model_folder(path: Path, *, key: bytes) -> ModelFolder:
    """Open the folder, making it where it can be made. `key`: what key.json holds; `path` is named after it.

    Raises OSError where there is nothing to read and nothing can be written.
    """
    for _ in range(_TRIES):
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            if not path.is_dir():  # one that is there can be read, whoever may write
                raise
        with suppress(FileNotFoundError), open_folder_descriptor(path) as folder:
            found = _try_open(path, folder, key)
            if found is not None:
                return found
        time.sleep(_PAUSE_S)
    raise OSError(errno.EBUSY, "another process keeps it locked", str(path))


def _try_open(path: Path, folder: int, key: bytes) -> ModelFolder | None:
    """The folder; None where another process opens or removes it just now."""
    with ExitStack() as stack:
        in_use = _opened_for_all(IN_USE, folder, stack)
        alone = _locked(in_use, fcntl.LOCK_EX)
        if not (alone or _locked(in_use, fcntl.LOCK_SH)) or not is_at(in_use, path / IN_USE):
            return None
        model = ModelFolder(path, zlib.crc32(path.name.encode()), stack)
        _take_writer(model, folder)
        _fill(model, folder, key, alone=alone)
        if alone and not (_locked(in_use, fcntl.LOCK_SH) and is_at(in_use, path / IN_USE)):
            return None  # between the two locks there is none
        with suppress(OSError):
            os.utime(in_use)  # the least recently opened goes first
        model.stack = stack.pop_all()
        return model


def _opened(name: str, flags: int, folder: int, stack: ExitStack) -> int:
    descriptor = open_plain(name, flags, folder=folder)
    stack.callback(os.close, descriptor)
    return descriptor


def _exactly(descriptor: int) -> int:
    """Nothing is read ahead of what is asked for: the unit behind one may be one that stays in memory."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def _opened_for_all(name: str, folder: int, stack: ExitStack) -> int:
    try:
        return _opened(name, os.O_RDWR | os.O_CREAT, folder, stack)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        with suppress(FileNotFoundError):
            return _opened(name, os.O_RDONLY, folder, stack)
        raise


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _take_writer(model: ModelFolder, folder: int) -> None:
    with suppress(OSError):
        model.writes = _locked(_opened(WRITER, os.O_RDWR | os.O_CREAT, folder, model.stack), fcntl.LOCK_EX)
        model.held_by_other = not model.writes


def _fill(model: ModelFolder, folder: int, key: bytes, *, alone: bool) -> None:
    """Open the files, take what is whole, and, as the writer, put the rest right."""
    if model.writes:
        with suppress(OSError):
            _fill_for_writing(model, folder, key, alone=alone)
            return
        model.writes = False
    with suppress(FileNotFoundError), ExitStack() as own:  # nothing was ever written
        model.data = _exactly(_opened(DATA, os.O_RDONLY, folder, model.stack))
        data = _read(_opened(JOURNAL, os.O_RDONLY, folder, own), MOST_JOURNAL_NBYTES)
        units = parse_journal(data, key_crc=model.key_crc)[0] if _has_key(folder, key) else []
        _keep(model, units, os.fstat(model.data).st_size)


def _fill_for_writing(model: ModelFolder, folder: int, key: bytes, *, alone: bool) -> None:
    model.data = _exactly(_opened(DATA, os.O_RDWR | os.O_CREAT, folder, model.stack))
    model.journal = _opened(JOURNAL, os.O_RDWR | os.O_CREAT | os.O_APPEND, folder, model.stack)
    if not _has_key(folder, key):
        os.ftruncate(model.journal, 0)
        _write_key(folder, key)
    data = _read(model.journal, MOST_JOURNAL_NBYTES)
    units, model.journal_nbytes = parse_journal(data, key_crc=model.key_crc)
    if os.fstat(model.journal).st_size != model.journal_nbytes:
        os.ftruncate(model.journal, model.journal_nbytes)
    size = os.fstat(model.data).st_size
    _keep(model, units, size)
    model.end = aligned(max((unit.stop for unit in units if unit.stop <= size), default=0))
    if alone:
        if size != model.end:  # even a change to the same size is one by the file's times
            os.ftruncate(model.data, model.end)
    else:
        model.end = max(model.end, aligned(size))


def _keep(model: ModelFolder, units: list[CachedUnit], size: int) -> None:
    """The last line of a unit counts, if its bytes can be there."""
    model.units = {unit.name: unit for unit in units}
    model.units = {name: unit for name, unit in model.units.items() if unit.stop <= size}


def _read(descriptor: int, limit: int) -> bytes:
    """The file's bytes, at most `limit` of them."""
    parts, at = [], 0
    while at < limit and (part := os.pread(descriptor, min(_PIECE, limit - at), at)):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def _has_key(folder: int, key: bytes) -> bool:
    with ExitStack() as own, suppress(OSError):
        return _read(_opened(KEY, os.O_RDONLY, folder, own), len(key) + 1) == key
    return False


def _write_key(folder: int, key: bytes) -> None:
    """Whole or not at all."""
    with suppress(FileNotFoundError):
        os.unlink(NEW_KEY, dir_fd=folder)
    with ExitStack() as own:
        descriptor = _opened(NEW_KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder, own)
        os.write(descriptor, key)
        os.fsync(descriptor)
    os.rename(NEW_KEY, KEY, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)

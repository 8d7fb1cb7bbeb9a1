"""Which models' folders go when all of them together are larger than the limit. [no-torch]

    <cache folder>/<word of a key>/in_use       locked by whoever has the folder open; its time: when it was last opened
                                  /writer       locked by the one who writes
                                  /key.json, data.bin, journal

The least recently opened goes first, and never one that somebody has open. It is renamed before it is emptied, under a
lock that nobody else can have, so who opens it meanwhile finds it whole or not at all.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

IN_USE, WRITER, KEY, DATA, JOURNAL, NEW_KEY = "in_use", "writer", "key.json", "data.bin", "journal", "key.json.new"
_FILES = (IN_USE, WRITER, KEY, DATA, JOURNAL, NEW_KEY)
_MODEL = re.compile(r"[0-9a-f]{32}")
_LEAVING = re.compile(r"leaving-[0-9a-f]{32}-\d+")
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no links; a pipe does not hold us up


@dataclass(frozen=True)
class KeptModel:
    """A model's folder in the cache, its bytes and when it was last opened."""

    word: str
    nbytes: int
    opened_ns: int


def kept_models(root: Path) -> list[KeptModel]:
    """The models in the cache folder, least recently opened first; none where it cannot be listed."""
    try:
        words = [name for name in os.listdir(root) if _MODEL.fullmatch(name)]
    except (OSError, ValueError):  # ValueError: a name with a zero byte
        return []
    found = [model for word in words if (model := _look_at(root / word)) is not None]
    return sorted(found, key=lambda model: (model.opened_ns, model.word))


def _look_at(folder: Path) -> KeptModel | None:
    try:
        status = folder.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(status.st_mode):
        return None
    nbytes, opened_ns = 0, status.st_mtime_ns
    for name in _FILES:
        with suppress(OSError):
            found = (folder / name).lstat()
            nbytes += found.st_size
            opened_ns = found.st_mtime_ns if name == IN_USE else opened_ns
    return KeptModel(folder.name, nbytes, opened_ns)


def make_room(root: Path, *, limit_nbytes: int) -> int:
    """Remove models that nobody has open, the least recently opened first, until all fit; the bytes that are kept."""
    _remove_leavers(root)
    models = kept_models(root)
    used = sum(model.nbytes for model in models)
    for model in models:
        if used <= limit_nbytes:
            break
        if remove_model(root, model.word):
            used -= model.nbytes
    return used


def remove_model(root: Path, word: str) -> bool:
    """Remove a model's folder unless somebody has it open: whether it went. What is not ours in it stays."""
    leaving = root / f"leaving-{word}-{os.getpid()}"
    try:
        with open_folder_descriptor(root / word) as folder, _lone_lock(folder, root / word):
            os.rename(root / word, leaving)
            _empty(folder)
    except OSError:
        return False
    with suppress(OSError):
        os.rmdir(leaving)
    return True


@contextmanager
def open_folder_descriptor(path: Path) -> Iterator[int]:
    """A folder, as the place of names. Raises OSError for a link, or anything else that is no folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_plain(name: str, flags: int, *, folder: int) -> int:
    """Open a file of the folder. Raises OSError for a link, a pipe, or a file that has another name elsewhere."""
    descriptor = os.open(name, flags | _FLAGS, 0o600, dir_fd=folder)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{name} is not a plain file")
    return descriptor


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one that the path names now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False


@contextmanager
def _lone_lock(folder: int, path: Path) -> Iterator[None]:
    descriptor = open_plain(IN_USE, os.O_RDWR | os.O_CREAT, folder=folder)
    with closing(os.fdopen(descriptor, "rb")):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not is_at(descriptor, path / IN_USE):  # another one has removed it, and a third made it anew
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        yield


def _remove_leavers(root: Path) -> None:
    """What a process that was killed has left half removed."""
    with suppress(OSError):
        for name in os.listdir(root):
            if _LEAVING.fullmatch(name):
                with suppress(OSError), open_folder_descriptor(root / name) as folder:
                    _empty(folder)
                    os.rmdir(root / name)


def _empty(folder: int) -> None:
    for name in reversed(_FILES):
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)

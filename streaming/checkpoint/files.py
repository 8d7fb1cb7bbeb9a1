"""Opening a checkpoint's files: each way a file can be unusable gets its name before anything is parsed. [no-torch]"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from streaming.checkpoint.remote_file import WeightFile
from streaming.errors import CheckpointFormatError
from streaming.open_files import FileState, state_of

_LFS_MARK = b"version https://git-lfs"
_LOST_LINK = (b"../../blobs/", b"../../../blobs/")  # what the links in the hub's cache hold
_JSON_LIMIT = 64 << 20  # bytes of a config or an index; real ones are below 10 MB
_MOST_VALUES = 3 << 18  # objects and lists, or keys; a fifth of the numbers and texts in them


@contextmanager
def open_weights(path: Path) -> Iterator[tuple[FileIO, int]]:
    """A regular, non-empty file and its size in bytes, opened for reading.

    Raises CheckpointFormatError that names the file: missing, a dangling link, a folder, no permission, empty,
    a git-lfs pointer, or failing while it is read.
    """
    try:
        # O_NONBLOCK: a named pipe would otherwise block here until somebody writes to it
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with FileIO(descriptor) as file:
            yield file, _checked_size(path, file)
    except OSError as error:
        raise CheckpointFormatError(f"{path}: {open_fault(path, error)}") from error


def states_before(paths: Iterable[Path]) -> dict[WeightFile, FileState]:
    """The states of files whose headers are about to be read; a file that is replaced or written to between its header
    and its weights then differs from what is noted here. One that cannot be looked at is left out: opening says why."""
    states: dict[WeightFile, FileState] = {}
    for path in paths:
        with suppress(OSError, ValueError):
            states[path] = state_of(os.stat(path))
    return states


def open_fault(path: Path, error: OSError) -> str:
    """In words, why the file could not be opened or read."""
    if isinstance(error, FileNotFoundError) and path.is_symlink():
        return f"is a link to {path.readlink()}, which does not exist (an incomplete download: fetch it again)"
    if isinstance(error, FileNotFoundError):
        return "does not exist"
    if isinstance(error, IsADirectoryError) or path.is_dir():
        return "is a folder where a file should be"
    if isinstance(error, PermissionError):
        return "may not be read (no permission)"
    return f"cannot be read: {error.strerror or error}"


def _checked_size(path: Path, file: FileIO) -> int:
    status = os.fstat(file.fileno())
    if stat.S_ISDIR(status.st_mode):
        raise CheckpointFormatError(f"{path}: is a folder where a file should be")
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointFormatError(f"{path}: is not a regular file")
    if status.st_size == 0:
        raise CheckpointFormatError(f"{path}: is empty (0 bytes); fetch it again")
    if fault := stand_in(os.pread(file.fileno(), 256, 0), status.st_size):
        raise CheckpointFormatError(f"{path}: {fault}")
    return status.st_size


def stand_in(start: bytes, size: int) -> str | None:
    """Whether a small text stands where the file should be, by the file's first bytes."""
    if start.startswith(_LFS_MARK):
        return f"is a git-lfs pointer of {size} bytes, not the file itself; fetch it with: git lfs pull"
    if start.startswith(_LOST_LINK) and size == len(start):
        target = start.decode("ascii", "replace").strip()
        return f"is a text of {size} bytes, {target!r}: the hub's cache was copied without its links; fetch it again"
    return None


def read_exactly(path: Path, file: FileIO, nbytes: int) -> bytes:
    """The next `nbytes` bytes; CheckpointFormatError when the file ends before (it shrank meanwhile)."""
    parts = []
    missing = nbytes
    while missing and (part := file.read(missing)):
        parts.append(part)
        missing -= len(part)
    if missing:
        raise CheckpointFormatError(f"{path}: ended {missing} bytes early: {nbytes} were asked, it changed while read")
    return b"".join(parts)


def read_json_object(path: Path, *, strict: bool = False) -> dict[str, Any]:
    """A small JSON file whose top is an object; `strict` refuses repeated keys. Raises CheckpointFormatError."""
    with open_weights(path) as (file, size):
        if size > _JSON_LIMIT:
            raise CheckpointFormatError(f"{path}: {size} bytes of JSON; at most {_JSON_LIMIT} are read")
        text = read_exactly(path, file, size)
    try:
        _check_bulk(text, most=_MOST_VALUES)
        found = strict_json(text) if strict else json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CheckpointFormatError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointFormatError(f"{path}: holds a JSON {type(found).__name__}, not an object")
    return found


def strict_json(text: bytes) -> Any:
    """Parse UTF-8 JSON, refusing what readers disagree on: a key given twice, NaN and Infinity; and what would take
    more memory than any real file. Raises ValueError."""
    _check_bulk(text, most=2 * _MOST_VALUES)
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _check_bulk(text: bytes, *, most: int) -> None:
    """Refuse what becomes far larger in memory than it is: three bytes of an empty list are 64 there."""
    found = max(text.count(b"{") + text.count(b"["), text.count(b":"), text.count(b",") // 5)
    if found > most:
        raise ValueError(f"it holds {found:,} values or more; no real file has so many")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"duplicate key {repeated!r}: it is given twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")

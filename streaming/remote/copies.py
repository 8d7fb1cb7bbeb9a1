"""Copies of remote files that are kept while they are read, for the next load (`--remote-cache`). [no-torch]

A copy is written beside, under a name that is never read, and takes its own name when every byte of it is on the disk.
That name holds a hash of address, size and version, so the copy of an older version is simply not found.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from streaming.checkpoint.remote_file import RemoteFile, WeightFile
from streaming.errors import StreamingError
from streaming.remote.ranges import RangeFetcher

PARTIAL = ".partial"
Say = Callable[[dict[str, Any]], None]
_ABANDONED_S = 24 * 3600.0  # an unfinished copy that nobody has written to for so long has lost its writer


def copy_path(file: RemoteFile, folder: Path) -> Path:
    """Where the finished copy of this version of the file is, or will be."""
    version = "\n".join((file.url, str(file.nbytes), file.etag or "", file.modified or ""))
    return folder / hashlib.sha256(version.encode()).hexdigest()[:32] / file.name


def with_copy(file: RemoteFile, folder: Path) -> WeightFile:
    """The finished copy where there is one; else the remote file, to be copied while it is read.

    Without ETag and date a version cannot be told from the next, so nothing is kept.
    """
    if file.etag is None and file.modified is None:
        return file
    path = copy_path(file, folder)
    with contextlib.suppress(OSError):
        if path.stat().st_size == file.nbytes:
            return path
    return replace(file, copy_to=path)


def choose_files(files: Iterable[RemoteFile], copies: Path | None) -> dict[WeightFile, WeightFile]:
    """What each file is read from: itself, or (see `with_copy`) its copy in the folder, where there is to be one."""
    if copies is None:
        return {file: file for file in files}
    remove_abandoned(copies)
    return {file: with_copy(file, copies) for file in files}


def remove_abandoned(folder: Path) -> None:
    """Remove unfinished copies that a process which was killed has left."""
    for path in folder.glob(f"*/*{PARTIAL}"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - _ABANDONED_S:
                path.unlink()


def partial_path(path: Path, token: str) -> Path:
    """Where the copy grows; `token` is its writer's own."""
    return path.with_name(f"{path.name}.{token}{PARTIAL}")


class PartialCopy:
    """A copy that grows while its file is read. Not for several threads at once."""

    def __init__(self, path: Path, *, nbytes: int, token: str) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path, self._nbytes = path, nbytes
        self._partial = partial_path(path, token)
        self._descriptor = os.open(self._partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        self._written: dict[int, int] = {}  # start -> stop of runs that were written

    def write(self, data: memoryview, offset: int) -> None:
        """Keep these bytes of the file; OSError when the disk does not take them."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], offset + done)

    def note(self, start: int, stop: int) -> None:
        """[start, stop) has been written whole."""
        self._written[start] = max(stop, self._written.get(start, 0))

    def holes(self) -> list[tuple[int, int]]:
        """What nobody has written yet, as [start, stop)."""
        holes, at = [], 0
        for start, stop in sorted(self._written.items()):
            if start > at:
                holes.append((at, start))
            at = max(at, stop)
        return [*holes, (at, self._nbytes)] if at < self._nbytes else holes

    def finish(self) -> None:
        """Make the copy the finished one; every byte must have been written."""
        assert not self.holes()
        os.fsync(self._descriptor)  # else a crash could leave a whole name on half the bytes
        os.replace(self._partial, self.path)
        os.close(self._descriptor)

    def abandon(self) -> None:
        """Give the disk's room back. The descriptor stays open: another thread may be about to write to it."""
        with contextlib.suppress(OSError):
            os.unlink(self._partial)
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)


class Copies:
    """The copies that are kept of remote files while they are read. A full disk costs the copy, not the load."""

    def __init__(self, files: Sequence[int | RemoteFile], token: str, say: Say) -> None:
        self._say, self._lock = say, threading.Lock()
        self._copies: dict[int, PartialCopy] = {}
        for index, file in enumerate(files):
            if isinstance(file, RemoteFile) and file.copy_to is not None:
                try:
                    self._copies[index] = PartialCopy(file.copy_to, nbytes=file.nbytes, token=token)
                except OSError as error:
                    self._warn(file.copy_to, error)

    def write(self, file: int, data: memoryview, offset: int) -> None:
        """Keep these bytes."""
        if (copy := self._copies.get(file)) is not None:
            try:
                copy.write(data, offset)
            except OSError as error:
                self._drop(file, error)

    def note(self, file: int, start: int, stop: int) -> None:
        """[start, stop) of the file has been written whole."""
        with self._lock:
            if (copy := self._copies.get(file)) is not None:
                copy.note(start, stop)

    def finish(self, files: Sequence[int | RemoteFile], fetcher: RangeFetcher) -> None:
        """Fetch what no parameter needed (headers), and make every copy whole."""
        for index, copy in list(self._copies.items()):
            try:
                for start, stop in copy.holes():
                    self._fill(copy, files[index], start, stop, fetcher)
                copy.finish()
            except (OSError, StreamingError) as error:
                self._drop(index, error)

    def _fill(self, copy: PartialCopy, file: int | RemoteFile, start: int, stop: int, fetcher: RangeFetcher) -> None:
        assert isinstance(file, RemoteFile)
        at = start

        def take(data: memoryview) -> None:
            nonlocal at
            copy.write(data, at)
            at += len(data)

        fetcher.fetch(file, start, stop, take)
        copy.note(start, stop)

    def _drop(self, file: int, error: Exception) -> None:
        with self._lock:
            if (copy := self._copies.pop(file, None)) is not None:
                copy.abandon()
                self._warn(copy.path, error)

    def _warn(self, path: Path, error: Exception) -> None:
        words = error.strerror if isinstance(error, OSError) else error
        self._say({"warning": f"{path}: no copy is kept ({words}); the load goes on without it"})

"""A few bytes of a weights file on demand, wherever it lies: embedding rows, and tensors that the plan looks at.

[no-torch]
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from streaming.checkpoint.remote_file import RemoteFile, WeightFile
from streaming.errors import CheckpointError
from streaming.file_faults import changed_fault, system_fault
from streaming.open_files import FileState, state_of
from streaming.reading import SHORT, read_fully

if TYPE_CHECKING:
    from streaming.remote.ranges import RangeFetcher


class FileRanges(Protocol):
    """One file, opened to be read here and there."""

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytearray]:
        """The bytes of each (offset, nbytes).

        Raises CheckpointError naming the file, StreamClosedError when it is cancelled.
        """
        ...

    def cancel(self) -> None:
        """Make whoever reads in another thread leave soon."""
        ...

    def close(self) -> None:
        """Give back what was opened. Safe to call twice."""
        ...


def open_ranges(file: WeightFile, *, state: FileState | None = None) -> FileRanges:
    """Open the file, which is to be in this state, if one is given (local files). Raises CheckpointError naming it."""
    return RemoteRanges(file) if isinstance(file, RemoteFile) else LocalRanges(file, state=state)


class LocalRanges:
    """A local file's ranges."""

    def __init__(self, path: Path, *, state: FileState | None = None) -> None:
        self._path, self._state = path, state
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(system_fault(path, error.errno)) from error

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytearray]:
        """All are asked for before the first is awaited: behind a busy reader each wait is long."""
        for offset, nbytes in ranges:
            os.posix_fadvise(self._descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)
        found = [self._read(offset, nbytes) for offset, nbytes in ranges]
        if self._state is not None and state_of(os.fstat(self._descriptor)) != self._state:
            raise CheckpointError(changed_fault(self._path))
        return found

    def _read(self, offset: int, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        try:
            code = read_fully(self._descriptor, memoryview(data), offset)
        except OSError as error:
            raise CheckpointError(system_fault(self._path, error.errno)) from error
        if code == SHORT:
            raise CheckpointError(f"{self._path}: ended before its byte {offset + nbytes:,}")
        return data

    def cancel(self) -> None:
        """A local read is short."""

    def close(self) -> None:
        """Give the descriptor back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class RemoteRanges:
    """A remote file's ranges, several on their way at once."""

    def __init__(self, file: RemoteFile) -> None:
        from streaming.remote.fetch_pool import FetchPool
        from streaming.remote.ranges import RetryPolicy

        self._file, self._pool = file, FetchPool(policy=RetryPolicy())

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytearray]:
        """Fetch them."""
        jobs: list[Callable[[RangeFetcher], bytearray]] = [partial(self._fetch, *bounds) for bounds in ranges]
        found = []
        for result in self._pool.run(jobs):
            if isinstance(result, CheckpointError):
                raise result
            found.append(result)
        return found

    def _fetch(self, offset: int, nbytes: int, fetcher: RangeFetcher) -> bytearray:
        data = bytearray()
        fetcher.fetch(self._file, offset, offset + nbytes, data.extend)
        return data

    def cancel(self) -> None:
        """Whoever reads leaves it at once."""
        self._pool.close()

    def close(self) -> None:
        """Let the connections go."""
        self._pool.close()

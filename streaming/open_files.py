"""The reader's files: opened when their first piece is due, closed behind their last one, and looked at after each.

A checkpoint may have more files than a process may have open. A file that changes while it is read gives numbers that
belong to no model, so its state is compared after every piece: what it was when the load was planned, and what it is.
It needs nothing but the standard library. [no-torch]
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Sequence

FileState = tuple[int, int, int, int]  # device, inode, bytes, time of the last change in ns
CHANGED = -2  # what a piece ends with when its file is not what it was


def state_of(status: os.stat_result) -> FileState:
    """What stays the same while nobody writes to a file or puts another one in its place."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class OpenFiles:
    """Descriptors of numbered files, by need. Where no more can be opened, those that nobody uses now are closed."""

    def __init__(
        self, paths: Sequence[str], states: Sequence[FileState], uses: Sequence[int], *, exactly: bool = False,
        flags: int = 0,
    ) -> None:  # fmt: skip
        """`uses`: how many pieces of each file will be taken in all. `exactly`: the system is to read what it is asked
        for and nothing behind it. `flags`: of open, beside those for reading."""
        self._paths, self._states, self._left = paths, states, list(uses)
        self._exactly, self._flags = exactly, flags | os.O_RDONLY | os.O_CLOEXEC
        self._open: dict[int, int] = {}
        self._users = [0] * len(paths)
        self._closed = False
        self._lock = threading.Lock()
        self._most = max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)  # maps take descriptors too

    def __len__(self) -> int:
        return len(self._paths)

    def take(self, file: int) -> int:
        """The file's descriptor, until it is given back. Raises OSError when it cannot be opened."""
        with self._lock:
            if self._closed:
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            if file not in self._open:
                self._open[file] = self._opened(file)
            self._users[file] += 1
            return self._open[file]

    def give_back(self, file: int, *, pieces: int = 1) -> int:
        """`pieces` of the file have been read: 0, or CHANGED."""
        with self._lock:
            same = state_of(os.fstat(self._open[file])) == self._states[file]
            self._users[file] -= 1
            self._left[file] -= pieces
            if (self._left[file] <= 0 or self._closed) and not self._users[file]:
                os.close(self._open.pop(file))
            return 0 if same else CHANGED

    def close(self) -> None:
        """Close what nobody uses, and the rest when it is given back."""
        with self._lock:
            self._closed = True
            self._close([file for file in self._open if not self._users[file]])

    def fault(self, file: int) -> int | str | None:
        """What is wrong with the file now: the system's error, or "changed"; None where nothing is, or where all are
        closed."""
        try:
            self.take(file)
        except OSError as error:
            return None if error.errno == errno.ECANCELED else error.errno or 0
        return "changed" if self.give_back(file, pieces=0) else None

    def path(self, file: int) -> str:
        """Where the file is."""
        return self._paths[file]

    def state(self, file: int) -> FileState:
        """What the file was."""
        return self._states[file]

    def nbytes(self, file: int) -> int:
        """How large the file was."""
        return self._states[file][2]

    def _opened(self, file: int) -> int:
        if len(self._open) >= self._most:
            self._close([other for other in self._open if not self._users[other]])
        while True:
            try:
                descriptor = os.open(self._paths[file], self._flags)
                if self._exactly and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
                return descriptor
            except OSError as error:
                idle = [other for other in self._open if not self._users[other]]
                if error.errno != errno.EMFILE or not idle:
                    raise
                self._close(idle)

    def _close(self, files: Sequence[int]) -> None:
        for file in files:
            os.close(self._open.pop(file))

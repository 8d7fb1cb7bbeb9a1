"""The peak of the memory of all processes of a run, sampled while it runs.

Shared memory is counted once, as proportional set sizes would count it; files that several processes map (the
interpreter's own libraries) are counted in each, so the figure is an upper bound of the summed PSS by a few MB.
Reading two small files per sample costs about 20 microseconds, where a true PSS walks every page table.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable

_RESIDENT = re.compile(rb"^Rss(?:Anon|File):\s*(\d+) kB", re.MULTILINE)


class MemoryWatch:
    """A thread that keeps the highest sum seen. `shared` gives the bytes of shared memory in use, `pids` the others."""

    def __init__(self, *, shared: Callable[[], int], pids: Callable[[], list[int]], interval_s: float = 0.02) -> None:
        self._shared, self._pids, self._interval_s = shared, pids, interval_s
        self._done = threading.Event()
        self.peak_nbytes = 0
        self.sample()  # a small model may be loaded before the thread's first look
        self._thread = threading.Thread(target=self._run, name="firstlayer-memory", daemon=True)
        self._thread.start()

    def sample(self) -> int:
        """Bytes now."""
        total = sum(_own_nbytes(pid) for pid in [os.getpid(), *self._pids()]) + self._shared()
        self.peak_nbytes = max(self.peak_nbytes, total)
        return total

    def close(self) -> None:
        """One last sample, then end."""
        self._done.set()
        self._thread.join()
        self.sample()

    def _run(self) -> None:
        while not self._done.wait(self._interval_s):
            self.sample()


def _own_nbytes(pid: int) -> int:
    """Anonymous and file-mapped resident bytes of a process; 0 when it is gone or the system does not tell."""
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            found = _RESIDENT.findall(file.read())
    except OSError:
        return 0
    return sum(int(kib) for kib in found) << 10

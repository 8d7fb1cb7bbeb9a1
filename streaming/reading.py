"""The reader's own program: fills memory from files, piece after piece, outside the interpreter that imports torch.

Run as `python -I -S reading.py` by `reader.py`, or as threads of the same process. It needs nothing but the standard
library, so it starts in about 10 ms. Importing torch holds the interpreter for seconds; a second process does not mind.

Standard input: one job (a line of JSON), then 8-byte counts of released window items as they grow. Its end means: stop.
Standard output: one RECORD per piece, in the order in which they end.
"""

import errno
import json
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

RECORD = struct.Struct("<iidd")  # piece, errno (0 = done, SHORT = the file ended), start and end on the monotonic clock
COUNT = struct.Struct("<Q")
SHORT = -1

_Piece = tuple[int, int, int, int, int, int]  # file, file offset, nbytes, region, dest, released


class PieceReader:
    """Takes pieces in order on several threads; each waits until the window has room for its piece."""

    def __init__(
        self,
        pieces: Sequence[_Piece],
        descriptors: Sequence[int],
        regions: Sequence[Any],
        report: Callable[[bytes], None],
        *,
        before: Callable[[int], None] | None = None,
    ) -> None:
        self._pieces, self._descriptors, self._regions = pieces, descriptors, regions
        self._report, self._before = report, before
        self._next, self._released, self._stopped = 0, 0, False
        self._changed = threading.Condition()

    def release(self, count: int) -> None:
        """`count` window items have been released in all."""
        with self._changed:
            self._released = max(self._released, count)
            self._changed.notify_all()

    def stop(self) -> None:
        """Take no further piece."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def run(self) -> None:
        """Read until no piece is left, one fails, or stop() is called."""
        while (index := self._take()) is not None:
            start = time.monotonic()
            code = self._read(index)
            self._report(RECORD.pack(index, code, start, time.monotonic()))
            if code:
                self.stop()

    def _take(self) -> int | None:
        with self._changed:
            while not self._stopped and self._next < len(self._pieces):
                if self._pieces[self._next][5] <= self._released:
                    self._next += 1
                    return self._next - 1
                self._changed.wait()
            return None

    def _read(self, index: int) -> int:
        file, offset, nbytes, region, dest, _ = self._pieces[index]
        try:
            if self._before is not None:
                self._before(index)
            return read_fully(self._descriptors[file], self._regions[region][dest : dest + nbytes], offset)
        except OSError as error:
            return error.errno or errno.EIO


def read_fully(descriptor: int, into: Any, offset: int) -> int:
    """Fill `into` from `offset`: 0, or SHORT when the file ends before."""
    done = 0
    while done < len(into):
        got = os.preadv(descriptor, [into[done:]], offset + done)
        if got == 0:
            return SHORT
        done += got
    return 0


def _serve() -> None:
    job = json.loads(sys.stdin.buffer.readline())
    regions = [memoryview(mmap.mmap(fd, size)) if size else memoryview(b"") for fd, size in job["regions"]]
    pieces = [tuple(piece) for piece in job["pieces"]]
    lock = threading.Lock()

    def report(record: bytes) -> None:
        with lock:
            os.write(1, record)

    reader = PieceReader(pieces, job["descriptors"], regions, report)
    threads = [threading.Thread(target=reader.run, daemon=True) for _ in range(job["threads"])]
    for thread in threads:
        thread.start()
    while len(count := sys.stdin.buffer.read(COUNT.size)) == COUNT.size:
        reader.release(COUNT.unpack(count)[0])
    os._exit(0)  # whoever asked is gone or wants no more: a read in flight must not keep the process


if __name__ == "__main__":
    _serve()

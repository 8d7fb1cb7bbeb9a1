"""The floor that every load is measured against: the bare read of the same files, into buffers that are used again."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

CHUNK_NBYTES = 4 << 20


def read_floor_s(files: Sequence[Path], *, threads: int = 2) -> float:
    """Seconds for reading all files whole, in pieces taken in order by a few threads."""
    pieces = _pieces(files)
    lock = threading.Lock()
    start = time.perf_counter()
    workers = [threading.Thread(target=_read_all, args=(pieces, lock)) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - start


def _pieces(files: Sequence[Path]) -> Iterator[tuple[Path, int]]:
    return iter([(file, start) for file in files for start in range(0, file.stat().st_size, CHUNK_NBYTES)])


def _read_all(pieces: Iterator[tuple[Path, int]], lock: threading.Lock) -> None:
    buffer = bytearray(CHUNK_NBYTES)
    opened: dict[Path, int] = {}
    with contextlib.ExitStack() as stack:
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            file, offset = piece
            if file not in opened:
                opened[file] = os.open(file, os.O_RDONLY)
                stack.callback(os.close, opened[file])
            os.preadv(opened[file], [buffer], offset)


def evict(files: Sequence[Path]) -> None:
    """Drop the files' clean pages from the page cache, so that the next read is cold."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def warm(files: Sequence[Path]) -> None:
    """Bring the files into the page cache."""
    read_floor_s(files)

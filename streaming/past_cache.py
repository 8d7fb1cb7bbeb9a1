"""Files read past the system's page cache, by way of a small buffer that begins and ends where blocks of the disk do.

What is read once in a pass of many gigabytes is not worth a page of the cache; getting pages, filling and dropping them
takes a processor about as long as the bytes are on their way from a fast disk.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from contextlib import suppress

import torch

from streaming.open_files import OpenFiles
from streaming.page_cache import O_DIRECT
from streaming.reading import SHORT, FlatPiece

BLOCK = 4096  # what offsets, sizes and addresses are multiples of
BUFFER_NBYTES = 2 << 20  # of each thread that reads


class PastReader:
    """Reads runs of bytes of any file that was opened so, to any place; each thread has a buffer of its own."""

    def __init__(self) -> None:
        self._buffers = threading.local()

    def read(self, descriptor: int, raw: torch.Tensor, *, offset: int) -> int:
        """Fill `raw` (uint8) from `offset`: 0, or SHORT where the file ends before. Raises OSError."""
        memory, numbers = self._buffer()
        done, nbytes = 0, raw.numel()
        while done < nbytes:
            at = offset + done
            start = at // BLOCK * BLOCK
            wanted = min(BUFFER_NBYTES, -(-(offset + nbytes - start) // BLOCK) * BLOCK)
            got = os.preadv(descriptor, [memory[:wanted]], start) - (at - start)
            if got <= 0:
                return SHORT
            count = min(got, nbytes - done)
            raw[done : done + count].copy_(numbers[at - start : at - start + count])  # lets other threads run
            done += count
        return 0

    def _buffer(self) -> tuple[memoryview, torch.Tensor]:
        """This thread's."""
        if not hasattr(self._buffers, "views"):
            memory = mmap.mmap(-1, BUFFER_NBYTES)
            self._buffers.views = memoryview(memory), torch.frombuffer(memory, dtype=torch.uint8)
        found: tuple[memoryview, torch.Tensor] = self._buffers.views
        return found


class PastCache:
    """Numbered files, opened for reads that the cache has no part in."""

    def __init__(self, files: OpenFiles) -> None:
        self._files, self._reader = files, PastReader()
        self.is_open = True  # False once a file system has refused

    def fill(self, piece: FlatPiece, raw: torch.Tensor) -> int | None:
        """Bring a piece to its place in `raw` (uint8): 0, SHORT or CHANGED; None where its file cannot be read so.

        Raises OSError.
        """
        try:
            descriptor = self._files.take(piece.file)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.is_open = False
            return None
        code, changed = 0, 0
        try:
            place = raw[piece.dest : piece.dest + piece.nbytes]
            code = self._reader.read(descriptor, place, offset=piece.offset)
        finally:
            changed = self._files.give_back(piece.file)
        return code or changed

    def close(self) -> None:
        """Give the descriptors back."""
        self._files.close()


class PastFile:
    """One file that is open already, opened once more for such reads; `is_open` is False where that is refused."""

    def __init__(self, descriptor: int) -> None:
        self._reader, self._descriptor = PastReader(), -1
        with suppress(OSError):  # a file system that knows no such reads, or no /proc
            self._descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | O_DIRECT)

    @property
    def is_open(self) -> bool:
        """Whether it can be read so."""
        return self._descriptor >= 0 and O_DIRECT != 0

    def read(self, raw: torch.Tensor, *, offset: int) -> None:
        """Fill `raw` (uint8) from `offset`. Raises EOFError where the file ends before, OSError."""
        if self._reader.read(self._descriptor, raw, offset=offset):
            raise EOFError(f"the file ends before {offset + raw.numel()}")

    def close(self) -> None:
        """Give the descriptor back. Safe to call twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

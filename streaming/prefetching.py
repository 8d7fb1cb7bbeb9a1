"""The `prefetch` strategy: threads that pull blocks into the page cache ahead of the reader, in its own order.

Where each read waits long for its answer (a network file system), many must be under way at once. The bytes go into a
scratch buffer and are dropped; what stays is the page cache, in which the reader finds them. It needs nothing but the
standard library. [no-torch]
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from streaming.column_reads import skips_gaps
from streaming.open_files import OpenFiles
from streaming.reading import Fill, FlatPiece, PieceReader

STEP_NBYTES = 1 << 20

Block = tuple[int, int, int, int, int]  # file, offset, nbytes, last piece, bytes of the plan before it


def plan_blocks(pieces: Sequence[FlatPiece], *, block_nbytes: int) -> list[Block]:
    """The pieces' bytes in their order, as runs of at most block_nbytes; pieces that touch share a block.

    Of a strided piece, the gaps that its reader reads along are fetched too.
    """
    blocks: list[Block] = []
    before = 0
    for index, piece in enumerate(pieces):
        file = piece.file
        for start, size in _parts(piece, block_nbytes):
            last = blocks[-1] if blocks else None
            if last and last[0] == file and last[1] + last[2] == start and last[2] + size <= block_nbytes:
                blocks[-1] = (file, last[1], last[2] + size, index, last[4])
            else:
                blocks.append((file, start, size, index, before))
            before += size
    return blocks


def _parts(piece: FlatPiece, most: int) -> Iterator[tuple[int, int]]:
    for offset, nbytes in _stretches(piece):
        for start in range(offset, offset + nbytes, most):
            yield start, min(most, offset + nbytes - start)


def _stretches(piece: FlatPiece) -> list[tuple[int, int]]:
    """(offset, nbytes) of what is read of the piece's file."""
    run, stride = piece.run_nbytes, piece.stride_nbytes
    if not (run and skips_gaps(run, stride)):
        return [(piece.offset, piece.span_nbytes)]
    return [(piece.offset + row * stride, run) for row in range(piece.nbytes // run)]


class Prefetcher:
    """Takes blocks in order on several threads, at most `ahead_nbytes` ahead of the reader."""

    def __init__(self, blocks: Sequence[Block], files: OpenFiles, *, sizes: Sequence[int], ahead_nbytes: int) -> None:
        """`sizes`: bytes of each of the reader's pieces."""
        self._blocks, self._files, self._sizes, self._ahead_nbytes = blocks, files, sizes, ahead_nbytes
        self._next, self._piece, self._read_nbytes, self._stopped = 0, -1, 0, False
        self._changed = threading.Condition()
        self.fetched: list[int] = []  # blocks, in the order in which they were begun

    def passed(self, piece: int) -> None:
        """The reader takes this piece now."""
        with self._changed:
            self._piece = max(self._piece, piece)
            self._read_nbytes += self._sizes[piece]
            self._changed.notify_all()

    def stop(self) -> None:
        """Take no further block."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def run(self) -> None:
        """Fetch until no block is left or stop() is called. A block that cannot be read is the reader's to report."""
        scratch = memoryview(mmap.mmap(-1, STEP_NBYTES))
        while (index := self._take()) is not None:
            try:
                self._fetch(*self._blocks[index][:3], scratch)
            except (OSError, MemoryError):
                return

    def _take(self) -> int | None:
        with self._changed:
            while not self._stopped and self._next < len(self._blocks):
                _, _, nbytes, last_piece, before = self._blocks[self._next]
                if last_piece <= self._piece:  # the reader has overtaken it
                    self._next += 1
                elif before + nbytes - self._read_nbytes <= max(self._ahead_nbytes, nbytes):
                    self._next += 1
                    self.fetched.append(self._next - 1)
                    self._changed.notify_all()
                    return self._next - 1
                else:
                    self._changed.wait()
            return None

    def _fetch(self, file: int, offset: int, nbytes: int, scratch: memoryview) -> None:
        descriptor = self._files.take(file)
        try:
            os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)
            done = 0
            while done < nbytes and not self._stopped:
                got = os.preadv(descriptor, [scratch[: min(STEP_NBYTES, nbytes - done)]], offset + done)
                if got == 0:
                    return
                done += got
        finally:
            self._files.give_back(file, pieces=0)


class PrefetchedReader:
    """A PieceReader with a Prefetcher ahead of it; `fetch` is run by the threads of the latter."""

    def __init__(
        self,
        pieces: Sequence[FlatPiece],
        files: OpenFiles,
        fill: Fill,
        report: Callable[[bytes], None],
        *,
        how: Mapping[str, Any],
        before: Callable[[int], None] | None = None,
    ) -> None:
        blocks = plan_blocks(pieces, block_nbytes=how["block_nbytes"])
        sizes = [sum(nbytes for _, nbytes in _stretches(piece)) for piece in pieces]
        self._ahead = Prefetcher(blocks, files, sizes=sizes, ahead_nbytes=how["ahead_nbytes"])
        passed = _both(before, self._ahead.passed)  # and no method of this one, which would be a ring
        self._reader = PieceReader(pieces, range(len(files)), fill, report, before=passed)
        self.fetch, self.run, self.release = self._ahead.run, self._reader.run, self._reader.release

    def stop(self) -> None:
        """Begin nothing more."""
        self._ahead.stop()
        self._reader.stop()


def _both(first: Callable[[int], None] | None, second: Callable[[int], None]) -> Callable[[int], None]:
    def call(piece: int) -> None:
        if first is not None:
            first(piece)
        second(piece)

    return call

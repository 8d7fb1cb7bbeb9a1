"""The `eager` strategy: one whole file at a time is read into memory, one byte after the other, and cut up there.

Fewest and longest reads, for file systems where each read is dear. Held at once is one file. Pieces whose place is free
from the start are cut as soon as their file is there; those that go through the window wait for their turn in the plan,
and where that turn comes after another file's, their file is read once more. `file_visits` tells beforehand how often.
It needs nothing but the standard library. [no-torch]
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence

from streaming.open_files import OpenFiles
from streaming.reading_records import RECORD, SHORT, FlatPiece, fault_code
from streaming.window_room import WindowRoom

STEP_NBYTES = 8 << 20
FINAL = 0  # the region whose pieces have room from the start

Put = Callable[[memoryview, FlatPiece], None]  # (the bytes of the file from the piece's first to its last, piece)


def file_visits(pieces: Sequence[tuple[int, bool]]) -> list[int]:
    """Which file is read when, given (file, whether its place is free from the start) of the pieces in plan order."""
    visits: list[int] = []
    seen: set[int] = set()
    for file, free in pieces:
        if free and file in seen:
            continue  # cut when the file was first in memory
        if not visits or visits[-1] != file:
            visits.append(file)
        seen.add(file)
    return visits


class WholeFileReader:
    """Reads files whole, in the order in which their pieces are due; on one thread."""

    def __init__(
        self,
        pieces: Sequence[FlatPiece],
        files: OpenFiles,
        put: Put,
        report: Callable[[bytes], None],
        *,
        before: Callable[[int], None] | None = None,
    ) -> None:
        self._pieces, self._files, self._put = pieces, files, put
        self._report, self._before = report, before
        self._room = WindowRoom()
        self._held, self._data = -1, memoryview(b"")
        self._done: set[int] = set()
        self._free: dict[int, list[int]] = {}
        for index, piece in enumerate(pieces):
            if piece.region == FINAL:
                self._free.setdefault(piece.file, []).append(index)

    def release(self, count: int) -> None:
        """`count` window items have been released in all."""
        self._room.release(count)

    def stop(self) -> None:
        """Read and cut nothing more."""
        self._room.stop()

    def run(self) -> None:
        """Read until no piece is left, one fails, or stop() is called."""
        for index, piece in enumerate(self._pieces):
            if index not in self._done and not (self._await(piece.released) and self._read(index, piece.file)):
                return

    def _await(self, released: int) -> bool:
        with self._room.changed:
            self._room.changed.wait_for(lambda: self._room.stopped or self._room.released >= released)
            return not self._room.stopped

    def _read(self, index: int, file: int) -> bool:
        """Cut the piece, and with a file that is new in memory all of its pieces that have room already."""
        start = time.monotonic()
        if file != self._held and (code := self._load(index, file)):
            self._report(RECORD.pack(index, code, start, time.monotonic()))
            return False
        return all(self._cut(each, start) for each in self._due(index, file))

    def _due(self, index: int, file: int) -> Iterator[int]:
        yield index
        yield from (other for other in self._free.pop(file, ()) if other != index)

    def _load(self, index: int, file: int) -> int:
        self._data, self._held = memoryview(b""), -1  # before the next one is allocated
        try:
            if self._before is not None:
                self._before(index)
            descriptor = self._files.take(file)
        except Exception as error:
            return fault_code(error)
        try:
            nbytes = self._files.nbytes(file)
            self._data = memoryview(mmap.mmap(-1, max(1, nbytes)))[:nbytes]
            self._data = self._data[: self._fill(descriptor)]
            self._held = file
        except Exception as error:
            return fault_code(error)
        finally:
            changed = self._files.give_back(file, pieces=len(self._pieces))  # it is in memory: no piece needs it open
        return 0 if len(self._data) < nbytes else changed  # cut short: the piece that is not there says so

    def _fill(self, descriptor: int) -> int:
        done = 0
        while done < len(self._data) and not self._room.stopped:
            got = os.preadv(descriptor, [self._data[done : done + STEP_NBYTES]], done)
            if got == 0:
                break
            done += got
        return done

    def _cut(self, index: int, start: float) -> bool:
        piece = self._pieces[index]
        data, code = self._data[piece.offset : piece.offset + piece.span_nbytes], 0
        if self._room.stopped:
            return False
        try:
            if len(data) < piece.span_nbytes:
                code = SHORT
            else:
                self._put(data, piece)
        except Exception as error:
            code = fault_code(error)
        self._done.add(index)
        self._report(RECORD.pack(index, code, start, time.monotonic()))
        return not code

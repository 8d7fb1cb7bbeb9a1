"""The reader's own program: fills memory from files, piece after piece, outside the interpreter that imports torch.

Run by `reader.py` as a process with `-I -S`, or as threads of the same process. It needs nothing but the standard
library, so it starts in about 10 ms. Importing torch holds the interpreter for seconds; a second process does not mind.

Standard input: one job (a line of JSON), then 8-byte counts of released window items as they grow. Its end means: stop.
Standard output: one RECORD per piece, in the order in which they end.
"""

import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from streaming.open_files import CHANGED as CHANGED
from streaming.open_files import OpenFiles
from streaming.reading_records import COUNT as COUNT
from streaming.reading_records import RECORD as RECORD
from streaming.reading_records import SHORT as SHORT
from streaming.reading_records import FlatPiece as FlatPiece
from streaming.reading_records import fault_code
from streaming.strided_fill import fill_memory_runs, fill_shared_runs, runs_of, write_runs
from streaming.window_room import WindowRoom

BUFFER_NBYTES = 1 << 20

Fill = Callable[[int, FlatPiece], int]  # (descriptor, piece) -> 0, or SHORT
Put = Callable[[memoryview, FlatPiece], None]  # (the bytes of the file from the piece's first to its last, piece)


class PieceReader:
    """Takes pieces in order on several threads; each waits until the window has room for its piece."""

    def __init__(
        self,
        pieces: Sequence[FlatPiece],
        descriptors: Sequence[int],
        fill: Fill,
        report: Callable[[bytes], None],
        *,
        before: Callable[[int], None] | None = None,
    ) -> None:
        self._pieces, self._descriptors, self._fill = pieces, descriptors, fill
        self._report, self._before = report, before
        self._next, self._room = 0, WindowRoom()

    def release(self, count: int) -> None:
        """`count` window items have been released in all."""
        self._room.release(count)

    def stop(self) -> None:
        """Take no further piece."""
        self._room.stop()

    def run(self) -> None:
        """Read until no piece is left, one fails, or stop() is called."""
        while (index := self._take()) is not None:
            start = time.monotonic()
            code = self._read(index)
            self._report(RECORD.pack(index, code, start, time.monotonic()))
            if code:
                self.stop()

    def _take(self) -> int | None:
        with self._room.changed:
            while not self._room.stopped and self._next < len(self._pieces):
                if self._pieces[self._next].released <= self._room.released:
                    self._next += 1
                    return self._next - 1
                self._room.changed.wait()
            return None

    def _read(self, index: int) -> int:
        piece = self._pieces[index]
        try:
            if self._before is not None:
                self._before(index)
            return self._fill(self._descriptors[piece.file], piece)
        except Exception as error:
            return fault_code(error)


def read_fully(descriptor: int, into: Any, offset: int) -> int:
    """Fill `into` from `offset`: 0, or SHORT when the file ends before."""
    done = 0
    while done < len(into):
        got = os.preadv(descriptor, [into[done:]], offset + done)
        if got == 0:
            return SHORT
        done += got
    return 0


def fill_memory(regions: Sequence[Any]) -> Fill:
    """Fills memory of this process."""
    buffers = threading.local()

    def fill(file: int, piece: FlatPiece) -> int:
        if piece.run_nbytes:
            return fill_memory_runs(file, piece, regions[piece.region], _own_buffer(buffers))
        return read_fully(file, regions[piece.region][piece.dest : piece.dest + piece.nbytes], piece.offset)

    return fill


def fill_shared(shared: Sequence[int]) -> Fill:
    """Fills shared memory through its descriptor, by way of a small buffer that stays in the cache.

    Writing to the descriptor takes a quarter less processor time than reading into a mapping of it (0.62 against 0.80
    seconds a GB, 2 cores, Linux 6.18): fresh pages are neither zeroed first nor faulted in one by one.
    """
    buffers = threading.local()

    def fill(file: int, piece: FlatPiece) -> int:
        buffer, done = _own_buffer(buffers), 0
        if piece.run_nbytes:
            return fill_shared_runs(file, piece, shared[piece.region], buffer)
        while done < piece.nbytes:
            got = os.preadv(file, [buffer[: min(BUFFER_NBYTES, piece.nbytes - done)]], piece.offset + done)
            if got == 0:
                return SHORT
            write_fully(shared[piece.region], buffer[:got], piece.dest + done)
            done += got
        return 0

    return fill


def _own_buffer(buffers: threading.local) -> memoryview:
    """This thread's."""
    if not hasattr(buffers, "view"):
        buffers.view = memoryview(mmap.mmap(-1, BUFFER_NBYTES))
    found: memoryview = buffers.view
    return found


def write_fully(descriptor: int, data: Any, offset: int) -> None:
    """Write all of `data`."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def fill_checked(files: OpenFiles, fill: Fill) -> Fill:
    """`fill`, given a file's number in place of its descriptor; CHANGED where the file is not what it was."""

    def fill_from(file: int, piece: FlatPiece) -> int:
        descriptor, changed = files.take(file), 0
        try:
            code = fill(descriptor, piece)
        finally:
            changed = files.give_back(file)
        return code or changed

    return fill_from


class Carrier(Protocol):
    """Who carries a job out: several threads may call run()."""

    def run(self) -> None:
        """Work until nothing is left, something fails, or stop() is called."""
        ...

    def release(self, count: int) -> None:
        """`count` window items have been released in all."""
        ...

    def stop(self) -> None:
        """Begin nothing more."""
        ...


Works = list[Callable[[], None]]  # what a carrier's threads run


def main() -> None:
    """Carry out one job from standard input: read files."""
    serve(_carrier_of)


def _carrier_of(job: Mapping[str, Any], report: Callable[[bytes], None]) -> tuple[Carrier, Works]:
    pieces = [FlatPiece(*piece) for piece in job["pieces"]]
    files = open_files_of(pieces, job["paths"], job["states"])
    return make_carrier(pieces, files, job["how"], shared_memory(job["regions"]), report)


def serve(carrier_of: Callable[[Mapping[str, Any], Callable[[bytes], None]], tuple[Carrier, Works]]) -> None:
    """Carry out one job from standard input, by whoever `carrier_of` makes of it and of where records go; the input's
    end means: stop."""
    job = json.loads(sys.stdin.buffer.readline())
    lock = threading.Lock()

    def report(record: bytes) -> None:
        with lock:
            try:
                os.write(1, record)
            except OSError:  # nobody listens any more
                os._exit(0)

    carrier, works = carrier_of(job, report)
    for work in works:
        threading.Thread(target=work, daemon=True).start()
    while len(count := sys.stdin.buffer.read(COUNT.size)) == COUNT.size:
        carrier.release(COUNT.unpack(count)[0])
    os._exit(0)  # whoever asked is gone or wants no more: a read in flight must not keep the process


def open_files_of(pieces: Sequence[FlatPiece], paths: Sequence[str], states: Sequence[Any]) -> OpenFiles:
    """The files of these pieces."""
    uses = [0] * len(paths)
    for piece in pieces:
        uses[piece.file] += 1
    return OpenFiles(paths, [tuple(state) for state in states], uses)


class Memory(NamedTuple):
    """The ways to fill one kind of memory."""

    fill: Fill
    fill_from_map: Callable[[], Fill]
    put: Put


def shared_memory(shared: Sequence[int]) -> Memory:
    """Memory behind descriptors."""

    def fill_from_map() -> Fill:
        from streaming.mapped_fill import fill_shared_from_map

        return fill_shared_from_map(shared)

    def put(data: memoryview, piece: FlatPiece) -> None:
        put_shared(data, piece, shared[piece.region])

    return Memory(fill_shared(shared), fill_from_map, put)


def own_memory(regions: Sequence[Any]) -> Memory:
    """Memory of this process."""

    def fill_from_map() -> Fill:
        from streaming.mapped_fill import fill_memory_from_map

        return fill_memory_from_map(regions)

    def put(data: memoryview, piece: FlatPiece) -> None:
        put_own(data, piece, regions[piece.region])

    return Memory(fill_memory(regions), fill_from_map, put)


def put_shared(data: memoryview, piece: FlatPiece, descriptor: int) -> None:
    """Write the piece, of its file's bytes from its first to its last, to its place behind a descriptor."""
    if piece.run_nbytes:
        write_runs(descriptor, runs_of(data, piece), piece.dest)
    else:
        write_fully(descriptor, data, piece.dest)


def put_own(data: memoryview, piece: FlatPiece, memory: Any) -> None:
    """The same to memory of this process."""
    if not piece.run_nbytes:
        memory[piece.dest : piece.dest + piece.nbytes] = data
        return
    for index, run in enumerate(runs_of(data, piece)):
        start = piece.dest + index * piece.run_nbytes
        memory[start : start + piece.run_nbytes] = run


def make_carrier(
    pieces: Sequence[FlatPiece],
    files: OpenFiles,
    how: Mapping[str, Any],
    memory: Memory,
    report: Callable[[bytes], None],
    *,
    before: Callable[[int], None] | None = None,
) -> tuple[Carrier, Works]:
    """Who reads, and what its threads run. `how` is a ReadMethod as a dict (see streaming.read_strategy)."""
    if how["strategy"] == "eager":
        from streaming.whole_files import WholeFileReader

        whole = WholeFileReader(pieces, files, memory.put, report, before=before)
        return whole, [whole.run]
    fill = fill_checked(files, memory.fill_from_map() if how["strategy"] == "lazy" else memory.fill)
    if how["strategy"] == "prefetch":
        from streaming.prefetching import PrefetchedReader

        ahead = PrefetchedReader(pieces, files, fill, report, how=how, before=before)
        return ahead, [*[ahead.fetch] * how["ahead_threads"], *[ahead.run] * how["threads"]]
    reader = PieceReader(pieces, range(len(files)), fill, report, before=before)
    return reader, [reader.run] * how["threads"]

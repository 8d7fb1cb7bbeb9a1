"""The reader's program where another package gets the bytes: the same plan, the same protocol, batch after batch.

Run by `reader.py` as a process of its own, so that what a package imports (torch, often) holds nobody up. A batch is as
many pieces, in plan order, as have room now and are not too many bytes; `fetch` brings them in whatever order it likes.
Strided pieces (a rank's columns of a matrix) no package knows: they are read here, as `reading.py` does. [no-torch]
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from streaming.column_reads import span_nbytes
from streaming.open_files import CHANGED, FileState, state_of
from streaming.read_strategy import BATCH_NBYTES
from streaming.reading import Fill, fill_memory
from streaming.reading_records import COUNT, RECORD, SHORT, FlatPiece
from streaming.window_room import Batches


@dataclass(frozen=True)
class Wanted:
    """One piece: where it is, which bytes of which memory it becomes, and after how many released items."""

    index: int
    path: str
    offset: int
    nbytes: int
    region: int
    dest: int
    released: int
    run_nbytes: int = 0  # 0: one run
    stride_nbytes: int = 0

    @property
    def stop(self) -> int:
        """Where it ends in the file."""
        return self.offset + span_nbytes(self.nbytes, self.run_nbytes, self.stride_nbytes)


class Fetch(Protocol):
    """Brings the pieces of a batch; gives each one's index once it lies in its place. Raises whatever it likes."""

    def __call__(self, batch: Sequence[Wanted]) -> Iterator[int]: ...


OpenFetch = Callable[[Sequence[memoryview]], Fetch]  # from the regions' memory


def open_batches(pieces: Sequence[Sequence[int]], paths: Sequence[str]) -> Batches[Wanted]:
    """The plan's pieces (the numbers of a FlatPiece), as many at once as have room."""
    wanted = [Wanted(index, paths[file], *rest) for index, (file, *rest) in enumerate(pieces)]
    return Batches(wanted, limit_nbytes=BATCH_NBYTES)


def fetch_all(
    batches: Batches[Wanted],
    fetch: Fetch,
    states: dict[str, FileState],
    report: Callable[[bytes], None],
    complain: Callable[[Exception], None],
) -> None:
    """Fetch and report until nothing is left, or a batch fails; its error, where the files do not explain it."""
    while batch := batches.take():
        start, error, landed = time.monotonic(), None, set[int]()
        try:
            for index in fetch(batch):
                landed.add(index)
        except Exception as caught:  # another package's
            error = caught
        for wanted in batch:
            code = _fault(wanted, states[wanted.path], failed=wanted.index not in landed)
            if code == errno.EIO and error is not None:
                complain(error)  # before the report: whoever hears that ends this process
            report(RECORD.pack(wanted.index, code, start, time.monotonic()))
            if code:
                return


def _fault(wanted: Wanted, planned: FileState, *, failed: bool) -> int:
    try:
        found = state_of(os.stat(wanted.path))
    except OSError as error:
        return error.errno or errno.EIO
    if found[2] < wanted.stop:
        return SHORT
    return CHANGED if found != planned else errno.EIO if failed else 0


def with_columns(fetch: Fetch, regions: Sequence[memoryview]) -> Fetch:
    """`fetch` for pieces that are one run; strided ones are read by this process itself."""
    fill = fill_memory(regions)

    def fetch_either(batch: Sequence[Wanted]) -> Iterator[int]:
        if plain := [wanted for wanted in batch if not wanted.run_nbytes]:
            yield from fetch(plain)
        for wanted in batch:
            if wanted.run_nbytes and not _read_columns(wanted, fill):
                yield wanted.index

    return fetch_either


def _read_columns(wanted: Wanted, fill: Fill) -> int:
    descriptor = os.open(wanted.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        piece = FlatPiece(
            0, wanted.offset, wanted.nbytes, wanted.region, wanted.dest, wanted.released, wanted.run_nbytes,
            wanted.stride_nbytes,
        )  # fmt: skip
        return fill(descriptor, piece)
    finally:
        os.close(descriptor)


def main(open_fetch: OpenFetch) -> None:
    """Carry out one job from standard input; its end means: stop."""
    job = json.loads(sys.stdin.buffer.readline())
    records = os.dup(1)
    os.dup2(2, 1)  # whatever a package prints must not mix with the records
    batches = open_batches(job["pieces"], job["paths"])
    states: dict[str, FileState] = {path: tuple(state) for path, state in zip(job["paths"], job["states"], strict=True)}

    def complain(error: Exception) -> None:
        sys.stderr.write(f"firstlayer: {job['how']['strategy']}: {type(error).__name__}: {error}\n")

    def work() -> None:
        try:
            regions = [_memory(descriptor) for descriptor in job["regions"]]
            fetch = with_columns(open_fetch(regions), regions)
            fetch_all(batches, fetch, states, lambda record: _write(records, record), complain)
        except Exception as error:  # the package cannot be used: no piece is there to report it by
            complain(error)
            os.close(records)

    threading.Thread(target=work, daemon=True).start()
    while len(count := sys.stdin.buffer.read(COUNT.size)) == COUNT.size:
        batches.release(COUNT.unpack(count)[0])
    os._exit(0)


def _write(records: int, record: bytes) -> None:
    try:
        os.write(records, record)
    except OSError:  # nobody listens any more
        os._exit(0)


def _memory(descriptor: int) -> memoryview:
    nbytes = os.fstat(descriptor).st_size if descriptor >= 0 else 0
    return memoryview(mmap.mmap(descriptor, nbytes)) if nbytes else memoryview(bytearray())

"""The reader's own program for remote files: fills memory from byte ranges, on several connections, in plan order.

Run by `reader.py` in this folder as a process of its own, before torch is imported, with nothing but this package and
the standard library (and obstore for object stores). It speaks the protocol of `streaming.reading`, and besides it
writes lines of JSON to a second pipe: what went wrong in words, warnings, and that the copies are finished.

Neighbouring pieces of a file are one request: a request costs a round trip, small tensors lie side by side. So is a
strided piece, of which whole rows are fetched and cut as they come.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streaming.checkpoint.remote_file import RemoteFile
from streaming.errors import StreamingError
from streaming.reading import COUNT, RECORD, FlatPiece, fill_shared, write_fully
from streaming.remote.copies import Copies, Say
from streaming.remote.ranges import RangeFetcher, RetryPolicy
from streaming.strided_fill import cut_part, write_runs
from streaming.window_room import Batches

BATCH_NBYTES = 8 << 20  # pieces that one thread takes at once
GAP_NBYTES = 64 << 10  # unneeded bytes between two pieces that are read along: cheaper than another request
NO_FAULT = 0
IN_WORDS = errno.EREMOTEIO  # the record's code of a fault whose words come by the second pipe


@dataclass(frozen=True)
class Piece:
    """One piece of the plan; `streaming.read_plan.Piece` says what each is."""

    index: int
    file: int
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
        return self.offset + self.flat.span_nbytes

    @property
    def flat(self) -> FlatPiece:
        """The same as the reader of local files takes it."""
        return FlatPiece(
            self.file, self.offset, self.nbytes, self.region, self.dest, self.released, self.run_nbytes,
            self.stride_nbytes,
        )  # fmt: skip

    def put(self, data: memoryview, start: int, descriptor: int) -> None:
        """Write what has come of its bytes, from `start` behind its first in the file on, to its place."""
        if self.run_nbytes:
            before, parts = cut_part(data, start, self.flat)
            write_runs(descriptor, parts, self.dest + before)
        else:
            write_fully(descriptor, data, self.dest + start)


def runs(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """The pieces in groups that one request brings: of one file, one behind the other, nearly touching."""
    run: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: (piece.file, piece.offset)):
        if run and (piece.file != run[-1].file or not 0 <= piece.offset - run[-1].stop <= GAP_NBYTES):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


class RunFiller:
    """One thread's work: fetch runs of pieces to where they stay, and report each piece as its last byte arrives."""

    def __init__(
        self,
        files: Sequence[int | RemoteFile],
        regions: Sequence[int],
        fetcher: RangeFetcher,
        copies: Copies,
        report: Callable[[bytes], None],
        say: Say,
    ) -> None:
        self._files, self._regions, self._fetcher = files, regions, fetcher
        self._copies, self._report, self._say = copies, report, say
        self._fill_local = fill_shared(regions)

    def fill(self, run: Sequence[Piece]) -> bool:
        """Whether all of the run's pieces have arrived; the fault is reported with the first that has not."""
        waiting = list(run)
        start_s = time.monotonic()
        try:
            code = self._fill(waiting)
        except StreamingError as fault:
            self._say({"piece": waiting[0].index, "words": str(fault)})
            code = IN_WORDS
        except OSError as error:
            code = error.errno or errno.EIO
        except Exception as error:  # unforeseen: a thread that ended without a word would leave others waiting
            self._say({"piece": waiting[0].index, "words": f"{type(error).__name__}: {error}"})
            code = IN_WORDS
        if code != NO_FAULT:
            self._report(RECORD.pack(waiting[0].index, code, start_s, time.monotonic()))
        return code == NO_FAULT

    def _fill(self, waiting: list[Piece]) -> int:
        file = self._files[waiting[0].file]
        if isinstance(file, RemoteFile):
            self._fetch(file, waiting)
            return NO_FAULT
        while waiting:
            piece, start_s = waiting[0], time.monotonic()
            if code := self._fill_local(file, piece.flat):
                return code
            self._done(waiting, start_s)
        return NO_FAULT

    def _fetch(self, file: RemoteFile, waiting: list[Piece]) -> None:
        index, start, stop = waiting[0].file, waiting[0].offset, waiting[-1].stop
        at, start_s = start, time.monotonic()

        def take(data: memoryview) -> None:
            nonlocal at, start_s
            self._copies.write(index, data, at)
            while data:
                piece = waiting[0]
                skipped = max(0, min(len(data), piece.offset - at))  # of the gap before the piece
                used = data[skipped : skipped + piece.stop - at - skipped]
                piece.put(used, at + skipped - piece.offset, self._regions[piece.region])
                at += skipped + len(used)
                data = data[skipped + len(used) :]
                if at == piece.stop:
                    self._done(waiting, start_s)
                    start_s = time.monotonic()

        self._fetcher.fetch(file, start, stop, take)
        self._copies.note(index, start, stop)

    def _done(self, waiting: list[Piece], start_s: float) -> None:
        self._report(RECORD.pack(waiting.pop(0).index, NO_FAULT, start_s, time.monotonic()))


class Writer:
    """Whole records to a pipe, from several threads."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._lock = descriptor, threading.Lock()

    def write(self, record: bytes) -> None:
        """Write it; the process ends when nobody listens any more."""
        with self._lock:
            try:
                os.write(self._descriptor, record)
            except OSError:
                os._exit(0)

    def say(self, line: dict[str, Any]) -> None:
        """Write it as a line of JSON."""
        self.write(json.dumps(line).encode() + b"\n")


def _carry_out(job: dict[str, Any], batches: Batches[Piece]) -> None:
    """Read everything; then finish the copies, unless something failed."""
    files = [_file(*entry) for entry in zip(job["files"], job["descriptors"], strict=True)]
    report, words = Writer(1).write, Writer(job["words"])
    policy = RetryPolicy(**job["policy"])
    copies = Copies(files, job["token"], words.say)
    failed = threading.Event()

    def work() -> None:
        filler = RunFiller(files, job["regions"], RangeFetcher(policy=policy), copies, report, words.say)
        while batch := batches.take():
            for run in runs(batch):
                if not filler.fill(run):
                    failed.set()
                    batches.stop()
                    return

    threads = [threading.Thread(target=work, daemon=True) for _ in range(job["threads"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if not failed.is_set():
        copies.finish(files, RangeFetcher(policy=policy))
        words.say({"finished": True})


def _file(entry: dict[str, Any] | None, descriptor: int) -> int | RemoteFile:
    if entry is None:
        return descriptor
    copy_to = entry.pop("copy_to")
    return RemoteFile(**entry, copy_to=None if copy_to is None else Path(copy_to))


def main() -> None:
    """Serve one job from standard input; its end means: stop."""
    job = json.loads(sys.stdin.buffer.readline())
    batches = Batches([Piece(index, *piece) for index, piece in enumerate(job["pieces"])], limit_nbytes=BATCH_NBYTES)
    threading.Thread(target=_carry_out, args=(job, batches), daemon=True).start()
    while len(count := sys.stdin.buffer.read(COUNT.size)) == COUNT.size:
        batches.release(COUNT.unpack(count)[0])
    os._exit(0)  # whoever asked is gone or wants no more: a read in flight must not keep the process

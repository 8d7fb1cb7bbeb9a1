"""Readers: whoever fills the regions of a ReadPlan with bytes, and reports each piece as it lands.

`ProcessReader` is a process of its own, started before torch is imported; its memory is shared with this one, so a
byte is copied once, from the page cache to where it stays. `ThreadReader` does the same with threads, where memory
cannot be shared by a descriptor, and for tests that hold pieces back. Both report through a pipe, which the event loop
waits for. This module imports neither torch nor anyio.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from streaming import reading
from streaming.errors import CheckpointError, WorkerError
from streaming.file_faults import descriptor_limit, system_fault
from streaming.open_files import FileState, state_of
from streaming.read_plan import ReadPlan, Region
from streaming.read_strategy import READ_THREADS, ReadMethod

_ROOT = Path(__file__).parents[1]
_PROGRAM = (
    "-I", "-S", "-c", "import sys; sys.path.append(sys.argv[1]); from streaming.reading import main; main()", str(_ROOT)
)  # fmt: skip
_DIRECT = ReadMethod()


@dataclass(frozen=True)
class Completion:
    """One piece that was read, or failed: `error` says what happened.

    None: it is there; an errno; "short": the file ended too early; "changed": the file is not what it was; or words.
    """

    piece: int
    error: int | str | None
    start_s: float
    end_s: float


class Reader(Protocol):
    """A ReadPlan being carried out."""

    @property
    def read_plan(self) -> ReadPlan:
        """What is read."""
        ...

    @property
    def pid(self) -> int | None:
        """The process that reads, when it is not this one."""
        ...

    @property
    def shared_nbytes(self) -> int:
        """Bytes of shared memory that hold data now, in whichever process they are mapped; 0 when none is shared."""
        ...

    def memory(self, region: Region) -> mmap.mmap | None:
        """The region's memory; None where the plan puts nothing there."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable when completions are waiting."""
        ...

    def completions(self) -> list[Completion]:
        """The completions that have arrived since; raises WorkerError when the reader is gone before its time."""
        ...

    def release(self, count: int) -> None:
        """Say that `count` items of the window have been released in all."""
        ...

    def close(self) -> None:
        """Stop reading and give descriptors back. Memory goes with its last user. Safe to call twice."""
        ...


def open_reader(read_plan: ReadPlan, *, method: ReadMethod = _DIRECT) -> Reader:
    """Start reading: in a process of its own where memory can be shared by a descriptor, in threads elsewhere."""
    if hasattr(os, "memfd_create"):
        return ProcessReader(read_plan, method=method)
    return ThreadReader(read_plan, method=method)


class _Records:
    """Whole records out of a pipe that may hand over parts of them."""

    def __init__(self, descriptor: int, total: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor, self._total, self._seen, self._rest = descriptor, total, 0, b""

    def take(self) -> list[Completion]:
        data = self._rest
        while chunk := self._chunk(found=len(data) // reading.RECORD.size):
            data += chunk
        whole = len(data) - len(data) % reading.RECORD.size
        self._rest = data[whole:]
        found = [_completion(*fields) for fields in reading.RECORD.iter_unpack(data[:whole])]
        self._seen += len(found)
        return found

    def _chunk(self, *, found: int) -> bytes:
        try:
            chunk = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return b""
        if not chunk and not found and self._seen < self._total:
            raise WorkerError(f"the reader ended after {self._seen} of {self._total} pieces")
        return chunk


def _completion(piece: int, code: int, start_s: float, end_s: float) -> Completion:
    return Completion(piece, _WORDS.get(code, code or None), start_s, end_s)


_WORDS = {reading.SHORT: "short", reading.CHANGED: "changed"}


def _flat(read_plan: ReadPlan) -> list[reading.FlatPiece]:
    return [
        reading.FlatPiece(
            p.file, p.file_offset, p.nbytes, int(p.region), p.dest, p.released, p.run_nbytes, p.stride_nbytes
        )
        for p in read_plan.pieces
    ]


def _as_told(piece: reading.FlatPiece) -> tuple[int, ...]:
    """The numbers of a piece in a job: plain ones, which most are, without those of runs."""
    return piece if piece.run_nbytes else piece[:6]


def open_files(read_plan: ReadPlan) -> list[int]:
    """Open every local file that is read, once, -1 for remote ones; CheckpointError names the one that cannot be."""
    descriptors: list[int] = []
    for file in read_plan.files:
        try:
            descriptors.append(os.open(file, os.O_RDONLY | os.O_CLOEXEC) if isinstance(file, Path) else -1)
        except OSError as error:
            _close_all(descriptors)
            raise CheckpointError(system_fault(file, error.errno)) from error
    return descriptors


def file_states(read_plan: ReadPlan) -> list[FileState]:
    """The states of local files, as they were planned, or as they are now; each can be opened.

    Raises CheckpointError naming the one that cannot be. They are opened again when their first piece is due.
    """
    states = []
    for index, file in enumerate(read_plan.files):
        assert isinstance(file, Path)
        try:
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(system_fault(file, error.errno)) from error
        try:
            states.append(read_plan.states[index] if read_plan.states else state_of(os.fstat(descriptor)))
        finally:
            os.close(descriptor)
    return states


def _paths(read_plan: ReadPlan) -> list[str]:
    return [os.path.abspath(str(file)) for file in read_plan.files]


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    descriptors.clear()


class ProcessReader:
    """A reader in a process of its own, writing into memory that both processes map.

    `program`, `job` and `inherited` are another program than `reading.py`: the interpreter's arguments, what it is told
    besides, and descriptors that it needs. It inherits the descriptors of all local files, unless it opens them itself
    (`by_path`).
    """

    def __init__(
        self,
        read_plan: ReadPlan,
        *,
        threads: int = READ_THREADS,
        method: ReadMethod | None = None,
        program: Sequence[str] = _PROGRAM,
        job: Mapping[str, object] = MappingProxyType({}),
        inherited: Sequence[int] = (),
        by_path: bool | None = None,
    ) -> None:
        self.read_plan = read_plan
        self._shared: dict[Region, int] = {}
        self._memory: dict[Region, mmap.mmap] = {}
        own = program is _PROGRAM if by_path is None else by_path
        states = file_states(read_plan) if own else []
        files = [] if own else open_files(read_plan)
        how = method or ReadMethod(threads=threads)
        try:
            self._share(Region.FINAL, read_plan.final_nbytes)
            self._share(Region.WINDOW, read_plan.window_nbytes)
            opened = [file for file in files if file >= 0]
            self._process = subprocess.Popen(
                [sys.executable, *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                pass_fds=[*opened, *self._shared.values(), *inherited], start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            _close_all(list(self._shared.values()))
            self._memory.clear()
            why = descriptor_limit() if error.errno == errno.EMFILE else error
            raise WorkerError(f"the reader process could not be started: {why}") from error
        finally:
            opened_by = {"paths": _paths(read_plan), "states": states} if own else {"descriptors": files}
            line = json.dumps({**self._job(how), **opened_by, **job}).encode() + b"\n"
            _close_all(files)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._records = _Records(self._process.stdout.fileno(), len(read_plan.pieces))
        self._send(line)

    def _share(self, region: Region, nbytes: int) -> None:
        if nbytes:
            descriptor = os.memfd_create(f"firstlayer-{region.name.lower()}", os.MFD_CLOEXEC)
            self._shared[region] = descriptor
            os.ftruncate(descriptor, nbytes)
            self._memory[region] = mmap.mmap(descriptor, nbytes)

    def _job(self, how: ReadMethod) -> dict[str, object]:
        regions = [self._shared.get(region, -1) for region in Region]
        pieces = [_as_told(piece) for piece in _flat(self.read_plan)]
        return {"regions": regions, "pieces": pieces, "threads": how.threads, "how": asdict(how)}

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # its end is noticed where completions are taken
            self._process.stdin.write(data)
            self._process.stdin.flush()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def shared_nbytes(self) -> int:
        return sum(os.fstat(descriptor).st_blocks * 512 for descriptor in self._shared.values())

    def memory(self, region: Region) -> mmap.mmap | None:
        return self._memory.get(region)

    def fileno(self) -> int:
        return self._records.descriptor

    def completions(self) -> list[Completion]:
        return self._records.take()

    def release(self, count: int) -> None:
        self._send(reading.COUNT.pack(count))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        _close_all(list(self._shared.values()))
        self._shared.clear()
        self._memory.clear()


def _own_memory(nbytes: int) -> mmap.mmap:
    """Private: what nobody shares is not counted as shared either."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class _RecordPipe:
    """The writing end of a pipe for records. It, and no reader, is what threads report to: a reader that its own
    threads' work referred to would be a ring, and keep its memory until the collector comes by."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def __call__(self, record: bytes) -> None:
        """Write one record; nothing, once it is closed: nobody asks any more."""
        with self._lock, contextlib.suppress(OSError):
            os.write(self._descriptor, record)

    def close(self) -> None:
        """Give the descriptor back."""
        with self._lock:
            descriptors, self._descriptor = [self._descriptor], -1
            _close_all(descriptors)


class ThreadReader:
    """A reader on threads of this process. `before` is called with each piece's index before it is read.

    `fill_of` makes, of the regions, what fills them in place of reads, as `reading.fill_memory` does: no file is opened
    then, and it is given a file's place in the plan where that one is given its descriptor.
    """

    def __init__(
        self,
        read_plan: ReadPlan,
        *,
        threads: int = READ_THREADS,
        method: ReadMethod | None = None,
        before: Callable[[int], None] | None = None,
        fill_of: Callable[[Sequence[memoryview]], reading.Fill] | None = None,
    ) -> None:
        self.read_plan = read_plan
        sizes = {Region.FINAL: read_plan.final_nbytes, Region.WINDOW: read_plan.window_nbytes}
        self._memory = {region: _own_memory(size) for region, size in sizes.items() if size}
        states = [] if fill_of else file_states(read_plan)
        pieces = _flat(read_plan)
        self._files = reading.open_files_of(pieces, _paths(read_plan), states)
        receive, send = os.pipe()
        self._report = _RecordPipe(send)
        self._records = _Records(receive, len(read_plan.pieces))
        regions = [memoryview(self._memory.get(region, b"")) for region in Region]
        works: list[Callable[[], None]]
        if fill_of is not None:
            files = range(len(read_plan.files))
            self._reader: reading.Carrier
            self._reader = reading.PieceReader(pieces, files, fill_of(regions), self._report, before=before)
            works = [self._reader.run] * threads
        else:
            how = asdict(method or ReadMethod(threads=threads))
            memory = reading.own_memory(regions)
            self._reader, works = reading.make_carrier(pieces, self._files, how, memory, self._report, before=before)
        self._threads = [threading.Thread(target=work, name="firstlayer-read", daemon=True) for work in works]
        self._closed = False
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int | None:
        return None

    @property
    def shared_nbytes(self) -> int:
        return 0

    def memory(self, region: Region) -> mmap.mmap | None:
        return self._memory.get(region)

    def fileno(self) -> int:
        return self._records.descriptor

    def completions(self) -> list[Completion]:
        return self._records.take()

    def release(self, count: int) -> None:
        self._reader.release(count)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._reader.stop()
        for thread in self._threads:
            thread.join(timeout=1.0)  # a read that hangs in the kernel cannot be cut short; it holds nothing else
        self._files.close()
        _close_all([self._records.descriptor])  # first: who waits for room in the pipe is let go
        self._report.close()
        self._memory.clear()

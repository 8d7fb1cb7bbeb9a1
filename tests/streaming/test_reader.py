"""Readers: the same bytes from both, nothing beyond the window, words for every fault, and nothing left behind."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import select
import signal
import subprocess
import sys
import termios
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from streaming import reading
from streaming.errors import CheckpointError, WorkerError
from streaming.open_files import state_of
from streaming.read_plan import Piece, ReadPlan, Region
from streaming.read_strategy import ReadMethod
from streaming.reader import Completion, ProcessReader, Reader, ThreadReader, open_reader
from tests.streaming.leftovers import nothing_left, open_descriptors
from tests.streaming.waiting import SOON_S, in_background, until

READERS = {"process": ProcessReader, "threads": ThreadReader}
ROOT = Path(__file__).parents[2]
each_reader = pytest.mark.parametrize("open_with", READERS.values(), ids=READERS)


@contextmanager
def no_collector() -> Iterator[None]:
    """What is only in rings stays for the length of this."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """4000 bytes, no two runs of them alike."""
    path = tmp_path / "weights.bin"
    path.write_bytes(b"".join(number.to_bytes(2, "big") for number in range(2000)))
    return path


def window_plan(file: Path, *, items: int = 6, nbytes: int = 100, room: int = 2) -> ReadPlan:
    """`items` items of one piece each go through a window that has room for `room` of them."""
    pieces = tuple(
        Piece(n, 0, n * nbytes, nbytes, Region.WINDOW, n % room * nbytes, max(0, n + 1 - room)) for n in range(items)
    )
    return ReadPlan((file,), pieces, 0, room * nbytes, {}, {})


def final_plan(*files: Path, nbytes: int = 1000) -> ReadPlan:
    """The first `nbytes` of every file, one behind the other, in pieces of 256."""
    pieces = tuple(
        Piece(number, number, start, min(256, nbytes - start), Region.FINAL, number * nbytes + start, 0)
        for number in range(len(files))
        for start in range(0, nbytes, 256)
    )
    return ReadPlan(files, pieces, len(files) * nbytes, 0, {}, {})


def take(reader: Reader, count: int) -> list[Completion]:
    """The next completions, at least `count` of them; waits for them."""
    found: list[Completion] = []
    while len(found) < count:
        assert select.select([reader.fileno()], [], [], SOON_S)[0], f"{len(found)} of {count} completions came"
        found += reader.completions()
    return found


@contextmanager
def opened(open_with: Callable[[ReadPlan], Reader], plan: ReadPlan) -> Iterator[Reader]:
    with closing(open_with(plan)) as reader:
        yield reader


# --- bytes ----------------------------------------------------------------------------------------------------------


@each_reader
def test_final_memory_holds_the_files_bytes(
    open_with: Callable[[ReadPlan], Reader], file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.bin"
    other.write_bytes(bytes(reversed(file.read_bytes())))
    plan = final_plan(file, other)
    with opened(open_with, plan) as reader:
        done = take(reader, len(plan.pieces))
        memory = reader.memory(Region.FINAL)
        assert memory is not None
        assert memory[:] == file.read_bytes()[:1000] + other.read_bytes()[:1000]
        assert sorted(completion.piece for completion in done) == list(range(len(plan.pieces)))
        assert {completion.error for completion in done} == {None}
        assert reader.memory(Region.WINDOW) is None
        assert reader.completions() == []


@each_reader
def test_the_window_gives_each_item_its_turn(open_with: Callable[[ReadPlan], Reader], file: Path) -> None:
    plan = window_plan(file)
    found = {}
    with opened(open_with, plan) as reader:
        window = reader.memory(Region.WINDOW)
        assert window is not None
        waiting = [completion.piece for completion in take(reader, 2)]
        for released in range(1, 7):
            piece = released - 1
            while piece not in waiting:
                waiting += [completion.piece for completion in take(reader, 1)]
            start = plan.pieces[piece].dest
            found[piece] = window[start : start + 100]
            reader.release(released)
    assert b"".join(found[piece] for piece in range(6)) == file.read_bytes()[:600]


@each_reader
def test_a_completion_says_when_it_was_read(open_with: Callable[[ReadPlan], Reader], file: Path) -> None:
    before = time.monotonic()
    with opened(open_with, final_plan(file)) as reader:
        done = take(reader, 4)
    assert all(before <= completion.start_s <= completion.end_s <= time.monotonic() for completion in done)


def test_the_default_reader_is_a_process_where_memory_can_be_shared(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_reader(final_plan(file))) as reader:
        assert isinstance(reader, ProcessReader)
        assert reader.pid not in (None, os.getpid())
    monkeypatch.delattr(os, "memfd_create")
    with closing(open_reader(final_plan(file))) as reader:
        assert isinstance(reader, ThreadReader)
        assert (reader.pid, reader.shared_nbytes) == (None, 0)


def test_shared_memory_is_counted_as_it_fills(file: Path) -> None:
    plan = final_plan(file)
    with closing(ProcessReader(plan)) as reader:
        take(reader, len(plan.pieces))
        assert reader.shared_nbytes == 4096  # 1000 bytes lie in one page


# --- backpressure ---------------------------------------------------------------------------------------------------


@each_reader
def test_nothing_beyond_the_window_is_read_before_room_is_given(
    open_with: Callable[[ReadPlan], Reader], file: Path
) -> None:
    """Both clocks are the machine's monotonic one: a read that was begun before the release would be seen here."""
    with opened(open_with, window_plan(file)) as reader:
        assert sorted(completion.piece for completion in take(reader, 2)) == [0, 1]
        for released in range(1, 5):
            moment = time.monotonic()
            reader.release(released)
            (completion,) = take(reader, 1)  # one release makes room for one
            assert completion.piece == released + 1
            assert completion.start_s >= moment


def test_a_direct_piece_behind_one_that_waits_is_not_read_first(file: Path) -> None:
    """Pieces are taken in plan order: else a later layer could fill the disk's queue before an earlier one."""
    first, second, third = window_plan(file, items=3, room=1).pieces
    direct = Piece(3, 0, 0, 100, Region.FINAL, 0, 0)
    plan = ReadPlan((file,), (first, second, direct, third), 100, 100, {}, {})
    with closing(ThreadReader(plan)) as reader:
        assert [completion.piece for completion in take(reader, 1)] == [0]
        reader.release(1)
        assert sorted(completion.piece for completion in take(reader, 2)) == [1, 2]


def test_counts_that_come_late_or_twice_take_nothing_back(file: Path) -> None:
    with closing(ThreadReader(window_plan(file))) as reader:
        take(reader, 2)
        reader.release(4)
        reader.release(1)
        assert sorted(completion.piece for completion in take(reader, 4)) == [2, 3, 4, 5]


# --- faults ---------------------------------------------------------------------------------------------------------


@each_reader
def test_a_file_that_shrank_after_the_plan_is_a_short_read(open_with: Callable[[ReadPlan], Reader], file: Path) -> None:
    plan = final_plan(file)
    os.truncate(file, 700)
    with opened(open_with, plan) as reader:
        errors: dict[int, int | str | None] = {}
        while "short" not in errors.values():
            errors |= {completion.piece: completion.error for completion in take(reader, 1)}
    assert {piece for piece, error in errors.items() if error is not None} <= {2, 3}  # bytes 512 to 768, and behind


@each_reader
def test_a_file_that_is_gone_is_named_when_reading_begins(open_with: Callable[[ReadPlan], Reader], file: Path) -> None:
    plan = final_plan(file, file.with_name("gone.bin"))
    with nothing_left(), pytest.raises(CheckpointError) as caught:
        open_with(plan)
    assert str(caught.value) == f"{file.with_name('gone.bin')}: No such file or directory"


@each_reader
def test_a_file_that_cannot_be_read_gives_the_systems_error(
    open_with: Callable[[ReadPlan], Reader], tmp_path: Path
) -> None:
    with opened(open_with, final_plan(tmp_path, nbytes=10)) as reader:  # a folder opens, and does not read
        assert [completion.error for completion in take(reader, 1)] == [errno.EISDIR]


def test_nothing_is_read_behind_a_fault(file: Path) -> None:
    begun: list[int] = []

    def fail(piece: int) -> None:
        begun.append(piece)
        raise OSError(errno.EIO, "the disk is gone")

    before = set(threading.enumerate())
    with closing(ThreadReader(final_plan(file), threads=1, before=fail)) as reader:
        for thread in set(threading.enumerate()) - before:
            thread.join(SOON_S)
        assert [(completion.piece, completion.error) for completion in take(reader, 1)] == [(0, errno.EIO)]
    assert begun == [0]


def test_a_fault_that_nobody_foresaw_is_reported_too(file: Path) -> None:
    """A thread that ends without a word would leave whoever waits for its piece waiting."""

    def fail(piece: int) -> None:
        raise ValueError("mmap length is greater than file size")

    with closing(ThreadReader(final_plan(file), threads=1, before=fail)) as reader:
        assert [(completion.piece, completion.error) for completion in take(reader, 1)] == [(0, errno.EIO)]


@pytest.mark.parametrize("strategy", ["lazy", "eager", "prefetch"])
def test_every_strategy_reports_a_fault_that_nobody_foresaw(file: Path, strategy: str) -> None:
    def fail(piece: int) -> None:
        raise MemoryError

    method = ReadMethod(strategy=strategy, threads=1)
    with closing(ThreadReader(final_plan(file), method=method, before=fail)) as reader:
        assert [(completion.piece, completion.error) for completion in take(reader, 1)] == [(0, errno.ENOMEM)]


@pytest.mark.parametrize("strategy", ["lazy", "eager", "prefetch", "direct"])
def test_no_file_stays_open_behind_its_last_piece(file: Path, tmp_path: Path, strategy: str) -> None:
    other = tmp_path / "other.bin"
    other.write_bytes(file.read_bytes())
    plan = final_plan(file, other)
    with closing(ThreadReader(plan, method=ReadMethod(strategy=strategy))) as reader:
        assert {completion.error for completion in take(reader, len(plan.pieces))} == {None}
        deadline = time.monotonic() + SOON_S
        while {str(file), str(other)} & set(open_descriptors().values()):
            assert time.monotonic() < deadline  # a thread of prefetch may be behind the reader


def test_a_reader_that_is_killed_in_the_middle_is_noticed_by_whoever_takes_completions(file: Path) -> None:
    with closing(ProcessReader(window_plan(file))) as reader:
        take(reader, 2)  # it waits for room now
        assert reader.pid is not None
        os.kill(reader.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"^the reader ended after 2 of 6 pieces$"):
            take(reader, 1)  # its pipe is readable: at its end


def test_what_arrived_before_the_reader_died_is_not_lost(file: Path) -> None:
    """All was read when it ended: nothing is missing, so nothing is wrong."""
    plan = final_plan(file)
    with closing(ProcessReader(plan)) as reader:
        assert reader.pid is not None
        wait_for_writes(reader, len(plan.pieces))
        os.kill(reader.pid, signal.SIGKILL)
        os.waitid(os.P_PID, reader.pid, os.WEXITED | os.WNOWAIT)
        assert len(reader.completions()) == len(plan.pieces)


def wait_for_writes(reader: Reader, records: int) -> None:
    """Return when so many records lie in the pipe, without taking them."""
    import array
    import fcntl
    import termios

    waiting = array.array("i", [0])
    deadline = time.monotonic() + SOON_S
    while waiting[0] < records * reading.RECORD.size:
        assert time.monotonic() < deadline
        select.select([reader.fileno()], [], [], SOON_S)
        fcntl.ioctl(reader.fileno(), termios.FIONREAD, waiting)


def test_releasing_to_a_reader_that_died_or_was_closed_is_no_error(file: Path) -> None:
    reader = ProcessReader(window_plan(file))
    assert reader.pid is not None
    os.kill(reader.pid, signal.SIGKILL)
    os.waitid(os.P_PID, reader.pid, os.WEXITED | os.WNOWAIT)
    reader.release(1)
    reader.close()
    reader.release(2)


def test_a_reader_that_cannot_be_started_leaves_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(file.with_name("no-python")))
    with nothing_left(), pytest.raises(WorkerError, match=r"the reader process could not be started: .*no-python"):
        ProcessReader(window_plan(file))


# --- the end --------------------------------------------------------------------------------------------------------


@each_reader
@pytest.mark.parametrize("taken", [0, 2])
def test_closing_in_the_middle_and_twice_leaves_nothing(
    open_with: Callable[[ReadPlan], Reader], file: Path, taken: int
) -> None:
    with nothing_left():
        reader = open_with(window_plan(file))
        take(reader, taken)
        reader.close()
        reader.close()
        del reader


@each_reader
def test_memory_outlives_the_reader_while_somebody_uses_it(open_with: Callable[[ReadPlan], Reader], file: Path) -> None:
    with opened(open_with, final_plan(file)) as reader:
        take(reader, 4)
        memory = reader.memory(Region.FINAL)
    assert memory is not None
    assert memory[:] == file.read_bytes()[:1000]


def test_a_process_that_does_not_answer_is_ended_all_the_same(file: Path) -> None:
    with nothing_left():
        reader = ProcessReader(window_plan(file))
        assert reader.pid is not None
        os.kill(reader.pid, signal.SIGSTOP)
        in_background(reader.close).result(SOON_S)
        del reader


def test_a_read_that_ends_after_the_reader_was_closed_says_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that hangs in the kernel is left behind; when it comes back it must not complain of closed pipes."""
    entered, come_back = threading.Semaphore(0), threading.Event()
    complaints: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", complaints.append)

    def hang(piece: int) -> None:
        entered.release()
        come_back.wait(SOON_S)

    before = set(threading.enumerate())
    reader = ThreadReader(final_plan(file), before=hang)
    for _ in range(2):
        assert entered.acquire(timeout=SOON_S)
    late = set(threading.enumerate()) - before
    reader.close()
    come_back.set()
    for thread in late:
        thread.join(SOON_S)
    assert [str(complaint.exc_value) for complaint in complaints] == []


PARENT = """
import sys
from pathlib import Path
from streaming.reader import ProcessReader
from streaming.read_plan import Piece, ReadPlan, Region
pieces = tuple(Piece(n, 0, 0, 10, Region.WINDOW, 0, n) for n in range(3))
reader = ProcessReader(ReadPlan((Path(sys.argv[1]),), pieces, 0, 10, {}, {}))
print(reader.pid, flush=True)
sys.stdin.read()
"""


def test_the_process_ends_when_its_parent_is_killed(file: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        watched = os.pidfd_open(pid)
        try:
            assert select.select([watched], [], [], 0)[0] == []  # it is there, waiting for room
            parent.kill()
            assert select.select([watched], [], [], SOON_S)[0] == [watched]  # readable: it has ended
        finally:
            os.close(watched)


def test_the_process_says_nothing_when_nobody_listens_any_more(file: Path) -> None:
    """Its parent may close the pipe of completions while a record is being written."""
    how = {"strategy": "direct", "threads": 2}
    state = state_of(file.stat())
    job = {"paths": [str(file)], "states": [state], "regions": [-1, -1], "pieces": [[0] * 6] * 3, "how": how}
    receive, send = os.pipe()
    command = [sys.executable, "-c", "from streaming.reading import main; main()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=send, stderr=subprocess.PIPE, cwd=ROOT) as process:
        os.close(send)
        os.close(receive)
        _, err = process.communicate(json.dumps(job).encode() + b"\n", timeout=SOON_S)
    assert err == b""


@pytest.mark.parametrize("strategy", ["direct", "lazy", "eager", "prefetch"])
@pytest.mark.parametrize("ended", [True, False], ids=["all read", "closed early"])
def test_a_closed_reader_of_threads_lets_its_memory_go_at_once(file: Path, strategy: str, ended: bool) -> None:
    """And not when the collector of rings comes by."""
    with no_collector():
        reader = ThreadReader(final_plan(file, file), method=ReadMethod(strategy=strategy))
        if ended:
            take(reader, 8)
        memory = reader.memory(Region.FINAL)
        assert memory is not None
        gone = [weakref.ref(reader), weakref.ref(memory)]
        reader.close()
        del reader, memory
        assert [ref() for ref in gone] == [None, None]


def test_a_reader_whose_reports_nobody_takes_is_closed_all_the_same(file: Path) -> None:
    """Its threads wait for room in the pipe, which is given back under them."""
    pieces = tuple(Piece(number, 0, number % 4000, 1, Region.FINAL, 0, 0) for number in range(6000))
    with nothing_left(), closing(ThreadReader(ReadPlan((file,), pieces, 4, 0, {}, {}), threads=2)) as reader:
        until(lambda: waiting_nbytes(reader.fileno()) > 60_000)  # of 64 KiB


def waiting_nbytes(descriptor: int) -> int:
    """Bytes in a pipe."""
    found = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
    return int.from_bytes(found, sys.byteorder)

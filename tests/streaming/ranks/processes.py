"""A command line of several processes under test: started, its members found by rank, one of them killed, the rest seen
to end, with what all of them wrote to stderr.

Members are known by a mark in their environment, which every process inherits: so an orphan is found too. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.streaming.waiting import SOON_S, until

_MARK = "FIRSTLAYER_TEST_RUN"
_ROOT = Path(__file__).parents[3]


@dataclass
class Run:
    """Rank 0's process, and all that it has brought to life."""

    process: subprocess.Popen[bytes]
    mark: str
    folder: Path

    @property
    def stdout(self) -> str:
        """What all of them wrote so far."""
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        """What all of them wrote so far."""
        return (self.folder / "stderr").read_text()

    def lines_of(self, rank: int) -> list[str]:
        """What a follower said of the end, on stderr."""
        return [line for line in self.stderr.splitlines() if line.startswith(f"firstlayer rank {rank}: ")]

    def members(self) -> set[int]:
        """The ids of all processes that live now, rank 0, followers and readers."""
        marked = f"{_MARK}={self.mark}".encode()
        return {pid for pid in _all_pids() if marked in _fields(pid, "environ")}

    def pid_of(self, rank: int) -> int | None:
        """Rank 0 is the process that was started; a follower has its rank as the last word of its command line, or
        (what torchrun starts) in its environment. None where it does not live."""
        if rank == 0 and _fields(self.process.pid, "environ") and not self._is_torchrun():
            return self.process.pid
        return next((pid for pid in sorted(self.members()) if self._rank_of(pid) == rank), None)

    def _is_torchrun(self) -> bool:
        words = _fields(self.process.pid, "cmdline")
        return any(word.endswith((b"torchrun", b"torch.distributed.run")) for word in words)

    def _rank_of(self, pid: int) -> int | None:
        words = _fields(pid, "cmdline")
        if len(words) > 4 and words[-4] in (b"streaming.ranks.follower", b"follow") and words[-1].isdigit():
            return int(words[-1])
        named = [field for field in _fields(pid, "environ") if field.startswith(b"RANK=")]
        is_rank = named and b"-I" not in words  # readers have their rank's environment
        return int(named[0].removeprefix(b"RANK=")) if is_rank else None

    def await_rank(self, rank: int) -> int:
        """A follower's id, once it is there; AssertionError where rank 0 ends before."""
        found: list[int] = []

        def is_there() -> bool:
            assert self.process.poll() is None, f"rank 0 has ended:\n{self.stderr}"
            pid = self.pid_of(rank)
            found.extend([] if pid is None else [pid])
            return bool(found)

        until(is_there)
        return found[0]

    def await_text(self, text: str) -> None:
        """Return when it stands on stdout."""

        def is_there() -> bool:
            assert self.process.poll() is None, f"rank 0 has ended:\n{self.stderr}"
            return text in self.stdout

        until(is_there)

    def kill(self, rank: int, *, number: int = signal.SIGKILL) -> int:
        """Send a signal to a rank; its id."""
        pid = self.pid_of(rank)
        assert pid is not None, f"rank {rank} does not live"
        os.kill(pid, number)
        return pid

    def wait(self, timeout_s: float = SOON_S) -> int:
        """Rank 0's exit status."""
        return self.process.wait(timeout=timeout_s)

    def left_after(self, timeout_s: float = SOON_S, *, but: int | None = None) -> set[int]:
        """The members (`but` one) that live on when the time is up; returns as soon as there are none."""
        deadline_s = time.monotonic() + timeout_s
        while (left := self.members() - {but}) and time.monotonic() < deadline_s:
            for pid in left:
                _await_end(pid, max(0.0, deadline_s - time.monotonic()))
        return left

    def end(self) -> None:
        """Kill what is left."""
        while left := self.members():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                _await_end(pid, SOON_S)
        self.process.wait(timeout=SOON_S)


@contextlib.contextmanager
def running(arguments: Sequence[str], folder: Path, *, environ: Mapping[str, str] | None = None) -> Iterator[Run]:
    """A command line (of Python, from "-m ..." on) in a process of its own, stdout and stderr into the folder; whatever
    lives at the end of the block is killed."""
    mark = uuid.uuid4().hex
    folder.mkdir(exist_ok=True)
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=_ROOT,
            env={**os.environ, **(environ or {}), _MARK: mark},
            start_new_session=True,
        )
    run = Run(process, mark, folder)
    try:
        yield run
    finally:
        run.end()


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _fields(pid: int, name: str) -> list[bytes]:
    """The words of /proc/PID/cmdline or environ; none of a process that is gone (or has ended and waits for its parent
    to notice)."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")[:-1]
    except OSError:
        return []


def _await_end(pid: int, timeout_s: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            select.select([descriptor], [], [], timeout_s)
        finally:
            os.close(descriptor)

"""Followers that start once and serve many models: starting seven processes that import torch takes far longer than the
tests that use them. Each is anew a follower of a real run: channel, plan, reader, process groups, caches."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from streaming.options import LoadOptions
from streaming.ranks.hub import Hub, open_hub

_PROGRAM = Path(__file__).with_name("pool_follower.py")
_ROOT = Path(__file__).parents[3]
_END_S = 10.0


class RankPool:
    """Follower r of every run is process r - 1. One that has ended, as a follower of a run that fails does, is started
    anew when it is needed. To be used by one run at a time."""

    def __init__(self) -> None:
        self._followers: list[_Follower] = []

    def fill(self, count: int) -> None:
        """Return when the first so many are free."""
        self._followers += [_Follower() for _ in range(count - len(self._followers))]  # they import at the same time
        for at in range(count):
            if not self._followers[at].becomes_free():
                self._followers[at].end()
                self._followers[at] = _Follower()
                assert self._followers[at].becomes_free(), "a follower of the pool does not start"

    def open_ranks(self, options: LoadOptions, **_: Any) -> Hub | None:
        """In the place of `streaming.ranks.launch.open_ranks`."""
        world = options.topology().world
        if world == 1:
            return None
        self.fill(world - 1)
        token = secrets.token_hex(16)
        hub = open_hub(world, token=token, rank_timeout_s=options.rank_timeout)
        for rank, follower in enumerate(self._followers[: world - 1], start=1):
            follower.join(f"127.0.0.1 {hub.port} {rank} {token}")
        return hub

    def close(self) -> None:
        """End all of them."""
        for follower in self._followers:
            follower.ask_to_end()
        for follower in self._followers:
            follower.end()
        self._followers.clear()


class _Follower:
    """A process that says on its stdout when it is free, and reads from its stdin what to join."""

    def __init__(self) -> None:
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        self._is_free = False

    def becomes_free(self) -> bool:
        """Wait until it is; False where it ends instead."""
        if not self._is_free:
            self._is_free = self._pipes[1].readline() == b"\n"
        return self._is_free

    def join(self, what: str) -> None:
        """Send it to a run."""
        self._is_free = False
        self._pipes[0].write(f"{what}\n".encode())
        self._pipes[0].flush()

    def ask_to_end(self) -> None:
        """As soon as it is free."""
        with contextlib.suppress(BrokenPipeError):
            self._pipes[0].close()

    def end(self) -> None:
        """Wait for its end, for a while."""
        self.ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_END_S)
        self._process.kill()
        self._process.wait()
        self._pipes[1].close()

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout

"""A follower's end of the control channel: the follower lives as long as the channel does. [no-torch]

The channel's thread ends the whole process, at once and whatever its other threads do: the main thread may be inside a
collective that waits for a rank that is gone, where no exception reaches it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import NoReturn

from streaming.cli import printable
from streaming.errors import RankError
from streaming.ranks.channel import ChannelError, Handlers, Link, Message, Progress, beat_s, rank_error, told
from streaming.ranks.version import channel_version
from streaming.ranks.waits import STOOD

_TICK_S = 0.25  # how often it is looked whether this process runs
_STOOD_S = 0.3  # that it was late by
_AGAIN_S = 0.1  # between attempts to reach rank 0
_ENDED = "rank 0: the process has ended"
_NOT_RANK_0 = "who listens there is not rank 0 of this run"
_GRACE_S = 3.0  # for rank 0 to say that it has heard
_LEAVE_S = 1.0  # for this process to end in its own way


class RunInterruptedError(RankError):
    """The user has ended the run: nothing need be said of it here."""


def connect(host: str, port: int, *, rank: int, token: str, timeout_s: float, patient: bool = False) -> Spoke:
    """Join rank 0; `patient`: which may not listen yet.

    Raises RankError: rank 0 when it cannot be joined in time, this rank when it is refused, and whichever rank has
    ended the run meanwhile; RunInterruptedError where the user has.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _join(host, port, rank=rank, token=token, timeout_s=max(_AGAIN_S, deadline - time.monotonic()))
        except (OSError, ChannelError) as error:
            if not patient or time.monotonic() + _AGAIN_S > deadline:
                raise RankError(0, f"could not be joined at {host} port {port}: {error}") from None
        time.sleep(_AGAIN_S)


def _join(host: str, port: int, *, rank: int, token: str, timeout_s: float) -> Spoke:
    """One attempt. Raises OSError and ChannelError for what may come right by waiting, RankError for a refusal."""
    connection = socket.create_connection((host, port), timeout=timeout_s)
    link = Link(connection, timeout_s=timeout_s)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.send({"kind": "hello", "rank": rank, "token": token, "version": channel_version()})
        answer = link.receive()
    except BaseException:
        link.close()
        raise
    if answer is None or answer["kind"] != "welcome":
        link.close()
        raise _no_welcome(answer, rank)
    try:
        world, rank_timeout_s = int(answer["world"]), float(answer["rank_timeout_s"])
        link.set_timeout(rank_timeout_s)
    except (KeyError, TypeError, ValueError, OverflowError):
        link.close()
        raise ChannelError(_NOT_RANK_0) from None
    return Spoke(link, rank=rank, world=world, rank_timeout_s=rank_timeout_s)


def _no_welcome(answer: Message | None, rank: int) -> RankError | ChannelError:
    if answer is not None and answer["kind"] == "refused":
        return RankError(rank, f"rank 0 does not take it: {answer.get('message')}")
    if answer is not None and answer["kind"] == "abort" and type(answer.get("rank")) is int:
        error = rank_error(answer)
        return RunInterruptedError(error.rank, error.cause) if answer.get("quiet") else error
    return ChannelError(_NOT_RANK_0)


def say(rank: int, words: str) -> None:
    """One line on stderr. Not through sys.stderr: another thread may hold its lock when the process must end."""
    with contextlib.suppress(OSError):
        os.write(2, f"{printable(f'firstlayer rank {rank}: error: {words}')}\n".encode(errors="replace"))


class Spoke:
    """See SpokeChannel for what each method promises."""

    def __init__(self, link: Link, *, rank: int, world: int, rank_timeout_s: float) -> None:
        self.rank, self.world, self.rank_timeout_s = rank, world, rank_timeout_s
        self.closing = threading.Event()
        self._link, self._handlers, self._progress = link, Handlers(), Progress()
        self._saying, self._said = threading.Lock(), False
        self._ended = threading.Event()
        for name, work in (("listen", self._listen), ("beat", self._beat)):
            threading.Thread(target=work, name=f"rank {name}", daemon=True).start()

    def send(self, message: Message) -> None:
        """See SpokeChannel."""
        with contextlib.suppress(OSError):  # the channel's thread sees the end, and ends the process
            self._link.send(message)

    def on(self, kind: str, callback: Callable[[Message], None]) -> None:
        """See SpokeChannel."""
        self._handlers.on(kind, callback)

    def tell_progress(self, progress: Progress) -> None:
        """See SpokeChannel."""
        self._progress = progress
        self.send({"kind": "progress", **asdict(progress)})

    def fail(self, error: BaseException) -> NoReturn:
        """Say on stderr and to rank 0 why this rank cannot go on, and end the process with status 1.

        A RankError is about another rank, so rank 0 is given a moment to say what it knows of that one first.
        """
        if isinstance(error, RankError) and error.rank != self.rank:
            self._ended.wait(_GRACE_S)  # the channel's thread ends the process meanwhile
        at, cause = told(error, self._progress)
        self._say(str(error) or type(error).__name__)
        self.send({"kind": "failed", "message": cause, **asdict(at)})
        self._ended.wait(_GRACE_S)  # rank 0 answers with "abort": it has heard
        os._exit(1)

    def close(self) -> None:
        """The run is over: leave the channel."""
        self._ended.set()
        self._link.close()

    # --- the channel's threads

    def _beat(self) -> None:
        beat, told_s = beat_s(self.rank_timeout_s), time.monotonic()
        tick = min(beat, _TICK_S)
        while True:
            begin_s = time.monotonic()
            if self._ended.wait(tick):
                return
            now = time.monotonic()
            with contextlib.suppress(OSError):
                if now - begin_s - tick >= _STOOD_S:  # the process was stopped, or its threads did not get to run
                    self._link.send_if_free({"kind": STOOD, "seconds": now - begin_s})
                if now - told_s >= beat - tick:
                    told_s = now
                    self._link.send_if_free({"kind": "alive"})

    def _listen(self) -> None:
        try:
            words = self._take_all()
        except TimeoutError:
            words = f"rank 0: no sign of life for {self.rank_timeout_s:g} s"
        except ConnectionError:
            words = _ENDED  # it had not read all that this rank said
        except (OSError, ChannelError) as error:
            words = f"rank 0: the connection to it has ended ({error})"
        except BaseException as error:
            at, cause = told(error, self._progress)  # a handler's fault, in this thread
            words = f"rank {self.rank}: {cause}"
            self.send({"kind": "failed", "message": cause, **asdict(at)})
        if not self._ended.is_set() and not self.closing.is_set():
            if words:
                self._say(words)
            os._exit(1)

    def _leave(self) -> None:
        """End the process unless its main thread has done so soon: it may be in a step that rank 0 has left, and has
        nothing to lose."""
        if not self._ended.wait(_LEAVE_S):
            os._exit(0)

    def _take_all(self) -> str:
        """Hand messages over until the channel ends; what is to be said of its end."""
        while (message := self._link.receive()) is not None:
            if message["kind"] == "abort":
                return "" if message.get("quiet") else str(rank_error(message))
            if message["kind"] == "close":
                self.closing.set()
                threading.Thread(target=self._leave, name="rank leave", daemon=True).start()
            if message["kind"] != "alive":
                self._handlers.call(message["kind"], message)
        return _ENDED

    def _say(self, words: str) -> None:
        with self._saying:
            if not self._said:
                self._said = True
                say(self.rank, words)

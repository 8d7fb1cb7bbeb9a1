"""Rank 0's end of the control channel: who has joined, who is alive, and how all end when one does. [no-torch]

A follower has failed when it says so, when its connection ends before the run does, when it shows no sign of life
within the time-out, or when it does not join in that time. The first failure is the run's: the other followers are told
it and end by themselves; those that this process started and that do not (the failed one perhaps, being stopped) are
killed after a moment, which also wakes a collective of this process that waits for them.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from streaming.errors import RankError, StreamClosedError
from streaming.ranks.channel import (
    LONGEST_HELLO,
    ChannelError,
    Handlers,
    Link,
    Message,
    Progress,
    abort_message,
    beat_s,
    rank_error,
    told,
)
from streaming.ranks.version import channel_version

logger = logging.getLogger(__name__)

_HELLO_S = 10.0  # for a stranger to say who it is
_STRANGERS = 64  # connections at once that have not shown the token
_AGAIN_S = 0.1  # until a connection can be taken again, where this process has no files or threads left
_GRACE_S = 3.0  # between telling followers to end and killing them


@dataclass
class _Seat:
    """A follower's place. Messages wait there until it has joined."""

    link: Link | None = None
    process: subprocess.Popen[bytes] | None = None
    left: threading.Event = field(default_factory=threading.Event)  # its connection has ended
    waiting: list[Message] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    progress: Progress | None = None


def open_hub(world: int, *, token: str, rank_timeout_s: float, host: str = "127.0.0.1", port: int = 0) -> Hub:
    """Listen for the followers 1 ... world - 1, who know the token. Port 0: any free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=max(world, 8))
    return Hub(listener, world=world, token=token, rank_timeout_s=rank_timeout_s)


class Hub:
    """See HubChannel for what each method promises. As a context manager: an exception in its block aborts the run, the
    end of the block closes it; an interrupt ends followers without a word."""

    def __init__(self, listener: socket.socket, *, world: int, token: str, rank_timeout_s: float) -> None:
        self.world, self.rank_timeout_s = world, rank_timeout_s
        self._listener, self._token = listener, token
        self._seats = {rank: _Seat() for rank in range(1, world)}
        self._handlers = Handlers()
        self._step: Callable[[], str] = str
        self._lock = threading.Lock()  # of the fields from here to the blank line
        self._failure: RankError | None = None
        self._failure_callbacks: list[Callable[[RankError], None]] = []
        self._told: Message | None = None  # what followers hear of the failure
        self._over = False  # closed, or failed: nothing that happens from now on is a failure

        self._failed, self._closing, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._strangers: dict[Link, None] = {}  # connections that have not shown the token, the oldest first
        self._strangers_lock = threading.Lock()
        self._threads = [
            threading.Thread(target=work, name=f"ranks {name}", daemon=True)
            for name, work in (("accept", self._accept), ("watch", self._watch))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def failure(self) -> RankError | None:
        """See HubChannel."""
        return self._failure

    @property
    def progress(self) -> Mapping[int, Progress]:
        """See HubChannel."""
        return {rank: seat.progress for rank, seat in self._seats.items() if seat.progress is not None}

    def adopt(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """This process started that follower: its exit status is looked at, and it is killed when it must be."""
        self._seats[rank].process = process

    # --- messages

    def name_step(self, layer: Callable[[], str]) -> None:
        """See HubChannel."""
        self._step = layer

    def send(self, rank: int, message: Message) -> None:
        """See HubChannel."""
        if self._over:
            raise self._end_error()
        try:
            self._put(self._seats[rank], message)
        except OSError as error:
            self._lost(rank, error)
            raise self._end_error() from None

    def _end_error(self) -> RankError | StreamClosedError:
        return self._failure or StreamClosedError("the ranks have been closed")

    def broadcast(self, message: Message) -> None:
        """See HubChannel."""
        for rank in self._seats:
            self.send(rank, message)

    def _put(self, seat: _Seat, message: Message) -> None:
        with seat.lock:
            if seat.link is None:
                seat.waiting.append(message)
            else:
                seat.link.send(message)

    def on(self, kind: str, callback: Callable[[int, Message], None]) -> None:
        """See HubChannel."""
        self._handlers.on(kind, callback)

    # --- joining

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._admit(Link(connection, timeout_s=_HELLO_S))
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                logger.debug("a connection that cannot be taken: %s", error)
                self._ended.wait(_AGAIN_S)

    def _admit(self, link: Link) -> None:
        """Listen to a stranger. Where there are too many, the oldest goes: a follower says at once who it is."""
        with self._strangers_lock:
            self._strangers[link] = None
            oldest = next(iter(self._strangers)) if len(self._strangers) > _STRANGERS else None
            if oldest is not None:
                del self._strangers[oldest]
        if oldest is not None:
            oldest.close()
        threading.Thread(target=self._serve, args=(link,), name="ranks link", daemon=True).start()

    def _serve(self, link: Link) -> None:
        """A connection's thread: who is it, and then all that it says."""
        try:
            rank = self._welcome(link)
        except (OSError, ChannelError) as error:
            logger.debug("a connection that did not join: %s", error)
            rank = None
        finally:
            self._no_stranger(link)
        if rank is not None:
            self._listen(rank, link)
        link.close()

    def _no_stranger(self, link: Link) -> None:
        with self._strangers_lock:
            self._strangers.pop(link, None)

    def _welcome(self, link: Link) -> int | None:
        """The rank that has joined; None for who may not. Raises OSError, ChannelError."""
        hello = link.receive(longest=LONGEST_HELLO, within_s=_HELLO_S)
        if hello is None or hello["kind"] != "hello":
            return None
        token, rank = hello.get("token"), hello.get("rank")
        if not isinstance(token, str) or not hmac.compare_digest(_as_bytes(token), _as_bytes(self._token)):
            return None
        self._no_stranger(link)
        link.set_timeout(_HELLO_S)
        if (fault := self._fault(rank, hello.get("version"))) is not None:
            link.send({"kind": "refused", "message": fault})
            if type(rank) is int and any(seat.link is None for seat in self._seats.values()):
                self._fail(RankError(rank, fault))  # it stands where one is missing; else it is one too many, no more
            return None
        assert isinstance(rank, int)
        return rank if self._seat(rank, link) else None

    def _fault(self, rank: object, version: object) -> str | None:
        if type(rank) is not int or rank not in self._seats:
            return f"is none of the followers 1 to {self.world - 1}"
        if version != channel_version():
            return f"runs firstlayer {version!s:.40}, rank 0 runs {channel_version()}"
        return "has joined twice" if self._seats[rank].link is not None else None

    def _seat(self, rank: int, link: Link) -> bool:
        """Let it in, with what has waited for it; False when another was quicker, or when the run has failed already:
        then it is told so."""
        seat = self._seats[rank]
        with seat.lock:
            if seat.link is not None or self._told is not None:
                link.send(self._told or {"kind": "refused", "message": "has joined twice"})
                return False
            link.send({"kind": "welcome", "world": self.world, "rank_timeout_s": self.rank_timeout_s})
            for message in seat.waiting:
                link.send(message)
            seat.waiting.clear()
            seat.link = link
        link.set_timeout(self.rank_timeout_s)
        return True

    # --- listening

    def _listen(self, rank: int, link: Link) -> None:
        cause: BaseException | str = ""
        try:
            while (message := link.receive()) is not None:
                self._take(rank, message)
        except (OSError, ChannelError) as error:
            cause = error
        self._seats[rank].left.set()
        self._lost(rank, cause)

    def _take(self, rank: int, message: Message) -> None:
        kind = message["kind"]
        if kind == "failed":
            self._fail(rank_error(message, rank=rank))
        elif kind == "progress":
            where = (str(message.get(name) or "") for name in ("layer", "stage", "tensor"))
            self._seats[rank].progress = Progress(*where)
        elif kind != "alive":
            self._call(rank, message)

    def _call(self, rank: int, message: Message) -> None:
        try:
            self._handlers.call(message["kind"], rank, message)
        except (RankError, StreamClosedError):
            logger.debug("rank %s said %s when all was over", rank, message["kind"])
        except Exception as error:
            logger.debug("handling %s of rank %s", message["kind"], rank, exc_info=True)
            self.abort(error)

    def _lost(self, rank: int, cause: BaseException | str) -> None:
        """A connection that ended, or that nothing comes from."""
        if self._over:
            return
        if isinstance(cause, TimeoutError):
            words = f"no sign of life for {self.rank_timeout_s:g} s"
        elif isinstance(cause, ChannelError):
            words = f"said what is no message: {cause}"
        else:
            words = self._last_words(rank)
        self._fail(self._at(rank, words))
        if isinstance(cause, TimeoutError) and (process := self._seats[rank].process) is not None:
            process.kill()  # it will not end by itself, and collectives wait for it

    def _at(self, rank: int, words: str) -> RankError:
        at = self._seats[rank].progress or Progress()
        layer = at.layer or (self._step() if at.stage == "forward" else "")
        return RankError(rank, words, layer=layer, stage=at.stage, tensor=at.tensor)

    def _last_words(self, rank: int) -> str:
        """How it ended, as far as can be known here."""
        process = self._seats[rank].process
        if process is None:
            return "its connection has ended"
        with contextlib.suppress(subprocess.TimeoutExpired):
            return _ending(process.wait(timeout=1.0))
        return "has closed its connection"

    # --- watching

    def _watch(self) -> None:
        """Signs of life to all; and who does not join."""
        deadline = time.monotonic() + self.rank_timeout_s
        while not self._ended.wait(beat_s(self.rank_timeout_s)):
            for rank, seat in self._seats.items():
                if seat.link is not None:
                    with contextlib.suppress(OSError):  # its own thread sees the end
                        seat.link.send_if_free({"kind": "alive"})
                elif not self._over:
                    self._check_joining(rank, seat, late=time.monotonic() > deadline)

    def _check_joining(self, rank: int, seat: _Seat, *, late: bool) -> None:
        if seat.process is not None and (status := seat.process.poll()) is not None:
            self._fail(RankError(rank, f"{_ending(status)} before it joined"))
        elif late:
            self._fail(RankError(rank, f"did not join within {self.rank_timeout_s:g} s"))

    # --- the end

    def on_failure(self, callback: Callable[[RankError], None]) -> None:
        """See HubChannel."""
        with self._lock:
            if self._failure is None:
                self._failure_callbacks.append(callback)
                return
        callback(self._failure)

    def wait_failure(self, timeout_s: float) -> RankError | None:
        """See HubChannel."""
        self._failed.wait(timeout_s)
        return self._failure

    def abort(self, error: BaseException) -> None:
        """See HubChannel."""
        if isinstance(error, RankError):
            self._fail(error)
        else:
            quiet = not isinstance(error, Exception)  # Ctrl-C, a task that was cancelled: no fault of anything
            at, cause = told(error, Progress())
            self._fail(
                RankError(0, "interrupted" if quiet else cause, layer=at.layer, stage=at.stage, tensor=at.tensor),
                quiet=quiet,
            )

    def _fail(self, error: RankError, *, quiet: bool = False) -> None:
        with self._lock:
            if self._over:
                return
            self._failure, self._over = error, True
            self._told = message = abort_message(error, quiet=quiet)
            callbacks = tuple(self._failure_callbacks)
        self._failed.set()
        threading.Thread(target=self._reap, args=(_GRACE_S,), name="ranks reaper", daemon=True).start()
        self._tell(message, [rank for rank in self._seats if rank != error.rank])
        for callback in callbacks:
            callback(error)
        self._tell(message, [rank for rank in self._seats if rank == error.rank])  # last: it may take nothing

    def _tell(self, message: Message, ranks: list[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(OSError):
                self._put(self._seats[rank], message)

    def _reap(self, grace_s: float) -> None:
        """Wait for the followers that this process started, then kill them."""
        deadline = time.monotonic() + grace_s
        processes = [seat.process for seat in self._seats.values() if seat.process is not None]
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def close(self) -> None:
        """See HubChannel."""
        with self._lock:
            self._over, first = True, not self._closing.is_set()
            self._closing.set()
        if not first:
            return
        if self._failure is None:
            self._tell({"kind": "close"}, list(self._seats))
        deadline = time.monotonic() + _GRACE_S
        for seat in self._seats.values():
            if seat.link is not None:
                seat.left.wait(max(0.0, deadline - time.monotonic()))
        self._reap(max(0.0, deadline - time.monotonic()))  # who comes to join meanwhile is told why not
        self._end()

    def _end(self) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for seat in self._seats.values():
            with seat.lock:
                if seat.link is not None:
                    seat.link.close()
        for thread in self._threads:
            thread.join(timeout=5.0)

    def __enter__(self) -> Hub:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(error)
        self.close()


def _as_bytes(token: str) -> bytes:
    return token.encode(errors="surrogatepass")  # JSON can say half a character


def _ending(status: int) -> str:
    """A process's end in words."""
    if status >= 0:
        return f"the process ended with exit status {status}"
    try:
        return f"the process was killed by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"the process was killed by signal {-status}"

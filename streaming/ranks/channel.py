"""The control channel's messages: one line of JSON each, over a TCP connection. [no-torch]

A message is an object with a "kind". Both ends keep these kinds for themselves: hello, welcome, refused (joining),
alive (heartbeats), progress, failed (a follower says that it cannot go on), abort (rank 0 says why all end), open (the
model and the options) and close (the run is over). Every other kind belongs to whoever registers a handler for it.

Order: what one end sends arrives in that order. Messages of a kind that nobody handles yet are kept, and handed over
in their order when a handler is registered: nothing is lost between joining and being ready to work.

Handlers are called one at a time (in the channel's threads, or in `on` itself for kept messages). They are short: put
work into a queue, set an event, send. They never wait for another message.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from streaming.errors import LayerLoadError, RankError, WorkerError

Message = dict[str, Any]

LONGEST_LINE = 64 << 20  # bytes: the token ids of any prompt, many times over
LONGEST_HELLO = 4096  # bytes, of those who have not shown the token yet
_CHUNK = 1 << 16


class ChannelError(WorkerError):
    """What came is no message."""


@dataclass(frozen=True)
class Progress:
    """Where a rank was when it last said so; empty where it does not apply."""

    layer: str = ""
    stage: str = ""
    tensor: str = ""


class HubChannel(Protocol):
    """Rank 0's end."""

    @property
    def world(self) -> int:
        """All ranks, rank 0 included."""
        ...

    @property
    def rank_timeout_s(self) -> float:
        """How long a rank may show no sign of life, or keep the others waiting."""
        ...

    @property
    def failure(self) -> RankError | None:
        """What ended the run; the first one, and the same ever after."""
        ...

    @property
    def progress(self) -> Mapping[int, Progress]:
        """Where each follower was, by rank; those that have said nothing yet are left out."""
        ...

    def name_step(self, layer: Callable[[], str]) -> None:
        """`layer()` is the one that all ranks compute now, as far as rank 0 knows: where a follower is that has loaded
        all and says no more of where it is."""
        ...

    def send(self, rank: int, message: Message) -> None:
        """To one follower; kept for it while it has not joined yet. Raises `failure` once there is one."""
        ...

    def broadcast(self, message: Message) -> None:
        """To every follower, in the order of the ranks. Raises as `send` does."""
        ...

    def on(self, kind: str, callback: Callable[[int, Message], None]) -> None:
        """Call `callback(rank, message)` for every message of a kind from now on, kept ones first."""
        ...

    def on_failure(self, callback: Callable[[RankError], None]) -> None:
        """Call `callback(error)` once when the run fails (at once where it has), from any thread. All followers but the
        failed one have been told then."""
        ...

    def wait_failure(self, timeout_s: float) -> RankError | None:
        """The failure, waiting a moment for it: for who has seen a collective break and not why."""
        ...

    def abort(self, error: BaseException) -> None:
        """Rank 0 gives up: tells every follower why, and kills those it started that do not end by themselves.

        A RankError says which rank is at fault (one that lags, say); any other error is rank 0's own. Only the first
        call has an effect, and none has one after a failure.
        """
        ...

    def close(self) -> None:
        """The end: tells followers to finish, waits for them a few seconds, kills what is left. Safe to call twice."""
        ...


class SpokeChannel(Protocol):
    """A follower's end. When the channel ends before `close` has come, or rank 0 says `abort`, the channel's thread
    writes one line to stderr and ends the process with status 1, whatever other threads do."""

    @property
    def rank(self) -> int:
        """This follower's rank."""
        ...

    @property
    def world(self) -> int:
        """All ranks."""
        ...

    @property
    def rank_timeout_s(self) -> float:
        """As rank 0 has it."""
        ...

    @property
    def closing(self) -> threading.Event:
        """Set when rank 0 has said `close`: finish and return within a second, or the process is ended, with status 0.
        Handlers of the kind "close" are called behind it."""
        ...

    def send(self, message: Message) -> None:
        """To rank 0. After the channel's end this does nothing: the process is about to end."""
        ...

    def on(self, kind: str, callback: Callable[[Message], None]) -> None:
        """Call `callback(message)` for every message of a kind from now on, kept ones first."""
        ...

    def tell_progress(self, progress: Progress) -> None:
        """Say where this rank is: rank 0 names it if this is the last that it hears. Cheap; once an item and stage."""
        ...


class Link:
    """One connection: whole messages in and out. `receive` is for one thread, `send` for any."""

    def __init__(self, connection: socket.socket, *, timeout_s: float) -> None:
        self._connection, self._rest = connection, bytearray()
        self._sending = threading.Lock()
        self.set_timeout(timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        """How long a `receive` may see nothing and a `send` may be stuck before they raise TimeoutError."""
        self._connection.settimeout(timeout_s)

    def send(self, message: Message) -> None:
        """Raises OSError when the other end is gone or takes nothing."""
        data = encoded(message)
        with self._sending:
            self._connection.sendall(data)

    def send_if_free(self, message: Message) -> None:
        """The same, or nothing while another thread sends: what it sends is a sign of life as good."""
        if self._sending.acquire(blocking=False):
            try:
                self._connection.sendall(encoded(message))
            finally:
                self._sending.release()

    def receive(self, *, longest: int = LONGEST_LINE, within_s: float | None = None) -> Message | None:
        """The next message; None at the end of the channel. `within_s`: all of it, however slowly it drips; then the
        connection's time-out is to be set anew. Raises OSError, ChannelError."""
        deadline = None if within_s is None else time.monotonic() + within_s
        while (end := self._rest.find(b"\n")) < 0:
            if len(self._rest) > longest:
                raise ChannelError(f"a message of more than {longest} bytes")
            if deadline is not None:
                self._set_rest(deadline)
            if not (data := self._connection.recv(_CHUNK)):
                return None
            self._rest += data
        line = bytes(self._rest[:end])
        del self._rest[: end + 1]
        return decoded(line)

    def _set_rest(self, deadline: float) -> None:
        if (rest := deadline - time.monotonic()) <= 0.0:
            raise TimeoutError("half a message, and no more in time")
        self.set_timeout(rest)

    def close(self) -> None:
        """End the connection; a `receive` in another thread sees its end."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def encoded(message: Message) -> bytes:
    """A message as it travels."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decoded(line: bytes) -> Message:
    """The message of a line. Raises ChannelError for what is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise ChannelError("a line that is no JSON") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ChannelError("a message without a kind")
    return message


def abort_message(error: RankError, *, quiet: bool) -> Message:
    """What followers are told of the failure; `quiet`: they need not repeat it."""
    where = {"layer": error.layer, "stage": error.stage, "tensor": error.tensor}
    return {"kind": "abort", "rank": error.rank, **where, "message": error.cause, "quiet": quiet}


def rank_error(message: Message, *, rank: int | None = None) -> RankError:
    """The error of an "abort", or of a "failed" of a rank."""
    where = {name: str(message.get(name) or "") for name in ("layer", "stage", "tensor")}
    return RankError(int(message["rank"]) if rank is None else rank, str(message.get("message")), **where)


def told(error: BaseException, at: Progress) -> tuple[Progress, str]:
    """Where and why, for a RankError: what an error of a layer says of the place is not said twice."""
    words = str(error) or type(error).__name__
    if not isinstance(error, LayerLoadError):
        return at, words
    said = f"layer {error.layer}, stage {error.stage}, tensor {error.tensor}: "
    return Progress(error.layer, error.stage, error.tensor), words.removeprefix(said)


def beat_s(rank_timeout_s: float) -> float:
    """Seconds between signs of life: several for each time-out."""
    return min(1.0, rank_timeout_s / 5)


class Handlers:
    """Callbacks by kind, called one at a time; messages that come before their handler are kept for it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a handler may register another one
        self._callbacks: dict[str, list[Callable[..., None]]] = {}
        self._kept: dict[str, list[tuple[Any, ...]]] = {}

    def on(self, kind: str, callback: Callable[..., None]) -> None:
        """Register; hands over what was kept."""
        with self._lock:
            self._callbacks.setdefault(kind, []).append(callback)
            for arguments in self._kept.pop(kind, ()):
                callback(*arguments)

    def call(self, kind: str, *arguments: Any) -> None:
        """Hand one message over, or keep it."""
        with self._lock:
            if kind not in self._callbacks:
                self._kept.setdefault(kind, []).append(arguments)
            for callback in tuple(self._callbacks.get(kind, ())):
                callback(*arguments)

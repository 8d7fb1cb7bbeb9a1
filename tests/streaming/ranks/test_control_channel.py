"""Rank 0's end of the control channel, spoken to over its socket: who may join, what arrives, and what is a failure."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import socket
from asyncio import CancelledError
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import cast

import pytest

from streaming.errors import RankError, StreamClosedError
from streaming.ranks.channel import ChannelError, Handlers, Link, Message, Progress, decoded, rank_error
from streaming.ranks.follower import follow
from streaming.ranks.hub import Hub, open_hub
from streaming.ranks.spoke import connect
from streaming.ranks.version import channel_version
from tests.streaming.waiting import SOON_S, in_background, until

TOKEN = "a-secret"


@pytest.fixture
def hub() -> Iterator[Hub]:
    opened = open_hub(3, token=TOKEN, rank_timeout_s=20.0)
    yield opened
    opened.abort(KeyboardInterrupt())  # raw connections never answer "close"
    opened.close()


@contextlib.contextmanager
def connected(hub: Hub, hello: Message | bytes | None) -> Iterator[Link]:
    connection = socket.create_connection(("127.0.0.1", hub.port), timeout=SOON_S)
    link = Link(connection, timeout_s=SOON_S)
    if isinstance(hello, bytes):
        connection.sendall(hello)
    elif hello is not None:
        link.send(hello)
    yield link
    link.close()


def hello(rank: object, **other: object) -> Message:
    return {"kind": "hello", "rank": rank, "token": TOKEN, "version": channel_version()} | other


def next_of(link: Link, kind: str) -> Message:
    while (message := link.receive()) is not None:
        if message["kind"] == kind:
            return message
    raise AssertionError(f"the channel ended without {kind}")


def test_what_is_sent_before_a_follower_joins_waits_for_it_in_order(hub: Hub) -> None:
    hub.broadcast({"kind": "step", "number": 0})
    hub.send(2, {"kind": "step", "number": 1})
    with connected(hub, hello(2)) as link:
        assert link.receive() == {"kind": "welcome", "world": 3, "rank_timeout_s": 20.0}
        assert [next_of(link, "step")["number"] for _ in range(2)] == [0, 1]


def test_messages_reach_their_handler_with_the_rank_and_wait_for_it(hub: Hub) -> None:
    with connected(hub, hello(1)) as link:
        link.send({"kind": "published", "layer": "embed"})
        link.send({"kind": "progress", "layer": "layers.0", "stage": "read", "tensor": "q"})
        until(lambda: hub.progress == {1: Progress("layers.0", "read", "q")})
        got: list[tuple[int, object]] = []
        hub.on("published", lambda rank, message: got.append((rank, message["layer"])))  # kept until now
        assert got == [(1, "embed")]
        late: list[int] = []
        hub.on("progress", lambda rank, message: late.append(rank))
        assert late == []  # looked at, and not kept: there is one for each weight and stage


def test_a_wrong_token_does_not_join_and_does_no_harm(hub: Hub) -> None:
    for wrong in (
        hello(1, token="guess"),
        hello(1, token=7),
        hello(1, token="\ud800"),
        {"kind": "step"},
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 9000,
    ):
        with connected(hub, wrong) as link, contextlib.suppress(ConnectionError):
            assert link.receive() is None
    with connected(hub, hello(1)) as link:
        next_of(link, "welcome")
    assert hub.wait_failure(SOON_S) is not None  # that link ended, and nothing else has failed before
    assert str(hub.failure) == "rank 1: its connection has ended"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (hello(1, version="0.0 (channel 0)"), f"runs firstlayer 0.0 (channel 0), rank 0 runs {channel_version()}"),
        (hello(3), "is none of the followers 1 to 2"),
        (hello(0), "is none of the followers 1 to 2"),
    ],
)
def test_a_follower_that_does_not_fit_is_refused_and_ends_the_run(wrong: Message, words: str, hub: Hub) -> None:
    with connected(hub, wrong) as link:
        assert next_of(link, "refused")["message"] == words
    failure = hub.wait_failure(SOON_S)
    assert str(failure) == f"rank {wrong['rank']}: {words}"


def test_a_rank_joins_once(hub: Hub) -> None:
    with connected(hub, hello(1)) as first:
        next_of(first, "welcome")
        with connected(hub, hello(1)) as second:
            assert next_of(second, "refused")["message"] == "has joined twice"
        assert str(hub.wait_failure(SOON_S)) == "rank 1: has joined twice"


def test_where_all_have_joined_a_rank_too_many_is_refused_and_ends_nothing(hub: Hub) -> None:
    with connected(hub, hello(1)) as first, connected(hub, hello(2)) as last:
        next_of(first, "welcome")
        next_of(last, "welcome")
        for number, words in ((1, "has joined twice"), (3, "is none of the followers 1 to 2")):
            with connected(hub, hello(number)) as another:
                assert next_of(another, "refused")["message"] == words
        hub.send(1, {"kind": "step"})
        next_of(first, "step")
        assert hub.failure is None


@pytest.mark.slow
def test_silent_strangers_keep_no_follower_out(hub: Hub) -> None:
    with contextlib.ExitStack() as strangers:
        links = [strangers.enter_context(connected(hub, b'{"kind":')) for _ in range(65)]  # one more than are kept
        with contextlib.suppress(ConnectionError):
            assert links[0].receive() is None  # the oldest has gone
        with connected(hub, hello(1)) as link:
            next_of(link, "welcome")


def test_a_message_that_drips_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dripping:
        settimeout = recv = staticmethod(lambda number: b" ")  # a byte a second

    monkeypatch.setattr("streaming.ranks.channel.time", SimpleNamespace(monotonic=itertools.count().__next__))
    with pytest.raises(TimeoutError, match="half a message"):
        Link(cast("socket.socket", Dripping()), timeout_s=10.0).receive(within_s=10.0)


@pytest.mark.parametrize(
    "answer", [b"{}\n", b'{"kind": "welcome"}\n', b'{"kind": "welcome", "world": 2, "rank_timeout_s": 1e300}\n',
               b'{"kind": "abort"}\n', b"HTTP/1.1 400 Bad Request\r\n"],
)  # fmt: skip
def test_who_answers_nonsense_is_not_rank_0(answer: bytes) -> None:
    def speak() -> None:
        with listener.accept()[0] as connection:
            connection.sendall(answer)
            connection.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        spoken = in_background(speak)
        with pytest.raises(RankError, match=r"^rank 0: could not be joined at 127\.0\.0\.1 port"):
            connect("127.0.0.1", listener.getsockname()[1], rank=1, token=TOKEN, timeout_s=SOON_S)
        spoken.result(SOON_S)


def test_a_hub_that_has_no_files_left_takes_followers_when_it_has_some_again(
    monkeypatch: pytest.MonkeyPatch, hub: Hub
) -> None:
    accept, faults = socket.socket.accept, iter([OSError(errno.EMFILE, "Too many open files")])

    def failing(listener: socket.socket) -> object:
        for fault in faults:
            raise fault
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    with connected(hub, hello(1)) as first, connected(hub, hello(2)) as second:  # the first ends the call that waits
        next_of(first, "welcome")
        next_of(second, "welcome")
    assert next(faults, None) is None


def test_the_first_failure_is_told_to_the_others_and_stays(hub: Hub) -> None:
    told: list[RankError] = []
    hub.on_failure(told.append)
    with connected(hub, hello(1)) as first, connected(hub, hello(2)) as second:
        next_of(first, "welcome")
        next_of(second, "welcome")
        first.send({"kind": "progress", "layer": "layers.7", "stage": "slice", "tensor": "w"})
        first.send({"kind": "failed", "message": "no room", "layer": "layers.7", "stage": "slice", "tensor": "w"})
        assert str(rank_error(next_of(second, "abort"))) == "rank 1, layer layers.7, stage slice, tensor w: no room"
        hub.abort(ValueError("too late"))
        failure = hub.failure
        assert failure is not None
        assert (failure.rank, failure.layer, failure.stage, failure.tensor) == (1, "layers.7", "slice", "w")
        with pytest.raises(RankError, match="no room"):
            hub.broadcast({"kind": "step"})
        late: list[RankError] = []
        hub.on_failure(late.append)
        until(lambda: told)  # behind the message to the others
        assert told == late == [failure]


@pytest.mark.parametrize("end", [KeyboardInterrupt(), CancelledError("by <Task 1>"), SystemExit(3)])
def test_followers_need_not_speak_of_an_end_that_the_user_wanted(end: BaseException, hub: Hub) -> None:
    with connected(hub, hello(1)) as link:
        next_of(link, "welcome")
        hub.abort(end)
        message = next_of(link, "abort")
        assert (message["message"], message["quiet"]) == ("interrupted", True)


def test_a_follower_that_comes_after_an_interrupt_says_nothing(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    hub.abort(KeyboardInterrupt())
    with ThreadPoolExecutor(1) as pool:  # off the main thread it leaves Ctrl-C as it is
        assert (
            pool.submit(follow, 1, lambda: connect("127.0.0.1", hub.port, rank=1, token=TOKEN, timeout_s=5)).result()
            == 1
        )
    assert capfd.readouterr().err == ""


def test_a_rank_that_comes_after_the_failure_is_told_it(hub: Hub) -> None:
    hub.abort(RankError(1, "lags"))
    with connected(hub, hello(2)) as link:
        message = link.receive()
        assert message is not None
        assert (message["kind"], str(rank_error(message))) == ("abort", "rank 1: lags")


def test_what_is_no_message_is_a_failure_of_who_said_it(hub: Hub) -> None:
    with connected(hub, hello(2)) as link:
        next_of(link, "welcome")
        link._connection.sendall(b"{]\n")
        assert str(hub.wait_failure(SOON_S)) == "rank 2: said what is no message: a line that is no JSON"


def test_a_fault_of_a_handler_is_rank_0s(hub: Hub) -> None:
    hub.on("done", lambda rank, message: [][1])
    with connected(hub, hello(1)) as link:
        next_of(link, "welcome")
        link.send({"kind": "done"})
        assert str(rank_error(next_of(link, "abort"))) == "rank 0: list index out of range"


def test_a_rank_that_never_comes_is_named() -> None:
    with open_hub(2, token=TOKEN, rank_timeout_s=0.2) as hub:
        assert str(hub.wait_failure(SOON_S)) == "rank 1: did not join within 0.2 s"


def test_closing_tells_followers_and_waits_for_them() -> None:
    hub = open_hub(2, token=TOKEN, rank_timeout_s=20.0)
    with connected(hub, hello(1)) as link:
        next_of(link, "welcome")
        closed = in_background(hub.close)
        next_of(link, "close")
        link.close()  # after `close` this is no failure
        closed.result(timeout=SOON_S)
    hub.close()
    assert hub.failure is None


def test_a_closed_hub_sends_nothing() -> None:
    hub = open_hub(2, token=TOKEN, rank_timeout_s=20.0)
    hub.close()
    assert hub.failure is None
    with pytest.raises(StreamClosedError, match="closed"):
        hub.send(1, {"kind": "step"})


@pytest.mark.parametrize("line", [b"", b"[]", b"7", b'{"kind":7}', b"{}", b"[" * 100_000, b"\xff"])
def test_a_line_that_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(ChannelError):
        decoded(line)


def test_messages_may_come_in_any_pieces() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours, timeout_s=SOON_S)
    data = b"".join(json.dumps({"kind": "step", "ids": list(range(n))}).encode() + b"\n" for n in range(5))
    for start in range(0, len(data), 7):
        theirs.sendall(data[start : start + 7])
    theirs.close()
    found = [link.receive() for _ in range(6)]
    assert [message and len(message["ids"]) for message in found] == [0, 1, 2, 3, 4, None]
    link.close()


def test_a_line_that_does_not_end_is_given_up() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"x" * 5000)
    with pytest.raises(ChannelError, match="more than 4096 bytes"):
        Link(ours, timeout_s=SOON_S).receive(longest=4096)
    ours.close()
    theirs.close()


def test_a_handler_may_register_another() -> None:
    handlers, got = Handlers(), list[str]()
    handlers.call("b", "kept")
    handlers.on("a", lambda: handlers.on("b", got.append))
    handlers.call("a")
    assert got == ["kept"]

"""Rank 0's table of who has which layer: what it tells, to whom, and whom it calls late."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from layers.topology import Topology
from streaming.errors import RankError
from streaming.ranks.agreement import AGREED, LOADED, PUBLISHED, Agreement
from streaming.ranks.channel import Message, Progress
from streaming.residency import LayerState, Residency
from streaming.trace import Tracer


@dataclass
class Wire:
    """A hub without followers: what is sent is kept, what they say is said by the test."""

    world: int
    rank_timeout_s: float = 10.0
    failure: RankError | None = None
    progress: Mapping[int, Progress] = field(default_factory=dict)
    sent: list[tuple[int, str]] = field(default_factory=list)
    callbacks: dict[str, Callable[[int, Message], None]] = field(default_factory=dict)

    def send(self, rank: int, message: Message) -> None:
        self.sent.append((rank, message["layer"]))
        assert message["kind"] == AGREED

    def broadcast(self, message: Message) -> None:
        raise NotImplementedError

    def on(self, kind: str, callback: Callable[[int, Message], None]) -> None:
        self.callbacks[kind] = callback

    def on_failure(self, callback: Callable[[RankError], None]) -> None:
        raise NotImplementedError

    def wait_failure(self, timeout_s: float) -> RankError | None:
        raise NotImplementedError

    def abort(self, error: BaseException) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def say(self, rank: int, layer: str) -> None:
        self.callbacks[PUBLISHED](rank, {"kind": PUBLISHED, "layer": layer})


@dataclass
class Run:
    """An agreement over rank 0's layers "a" and "b", at a time that the test sets."""

    topology: Topology
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.wire = Wire(self.topology.world)
        self.agreement = Agreement(self.wire, self.topology, clock=lambda: self.now_s)
        self.residency = Residency(["a", "b"], Tracer(), agree=self.agreement.publish)
        self.agreement.bind(self.residency)

    def is_ready(self, layer: str) -> bool:
        return self.residency.is_ready(layer)


@pytest.fixture
def run() -> Run:
    return Run(Topology(tensor=3))


def test_a_layer_is_ready_when_the_last_rank_has_it_and_all_are_told_then(run: Run) -> None:
    run.wire.say(2, "a")
    run.residency.publish("a")
    assert not run.is_ready("a")
    assert run.wire.sent == []
    run.wire.say(1, "a")
    assert run.is_ready("a")
    assert run.wire.sent == [(1, "a"), (2, "a")]
    assert run.residency.states()["b"] is LayerState.EMPTY


def test_rank_0_may_be_the_last(run: Run) -> None:
    for rank in (1, 2):
        run.wire.say(rank, "b")
    assert not run.is_ready("b")
    run.residency.publish("b")
    assert run.is_ready("b")


def test_each_stage_of_a_pipeline_agrees_by_itself() -> None:
    run = Run(Topology(tensor=2, pipeline=2))
    run.wire.say(2, "c")
    run.wire.say(3, "c")
    assert run.wire.sent == [(2, "c"), (3, "c")]
    run.residency.publish("a")
    run.wire.say(1, "a")
    assert run.is_ready("a")
    assert run.wire.sent[2:] == [(1, "a")]


def test_a_load_is_over_when_every_rank_has_said_so(run: Run) -> None:
    for layer in ("a", "b"):
        run.residency.publish(layer)
        for rank in (1, 2):
            run.wire.say(rank, layer)
    run.wire.callbacks[LOADED](1, {"kind": LOADED})
    assert not run.residency._others_loaded
    run.wire.callbacks[LOADED](2, {"kind": LOADED})
    run.residency.wait_everywhere()


def test_a_rank_that_keeps_the_others_waiting_is_named_with_where_it_is(run: Run) -> None:
    run.residency.publish("a")
    run.wire.say(1, "a")
    run.wire.progress = {2: Progress("a", "quantize", "a.weight")}
    assert run.agreement.laggard(10.0) is None
    run.now_s = 10.5
    late = run.agreement.laggard(10.0)
    assert str(late) == (
        "rank 2, layer a, stage quantize, tensor a.weight: keeps the others waiting for layer a (--rank-timeout 10)"
    )


def test_a_rank_that_comes_on_is_slow_and_not_late(run: Run) -> None:
    run.residency.publish("a")
    run.wire.say(1, "a")
    for step in range(5):
        run.now_s += 8.0
        run.wire.progress = {2: Progress("a", "quantize", str(step))}
        assert run.agreement.laggard(10.0) is None


def test_nobody_is_late_while_nobody_waits(run: Run) -> None:
    run.now_s = 1000.0
    assert run.agreement.laggard(10.0) is None

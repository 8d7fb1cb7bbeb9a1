"""The residency table: states, leases, waits that end, and the seconds that a wait is booked on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from streaming.errors import LayerLoadError, StreamClosedError
from streaming.residency import LayerState, Residency
from streaming.trace import Tracer
from tests.streaming.waiting import SOON_S, in_background

EMPTY, LOADING, READY = LayerState.EMPTY, LayerState.LOADING, LayerState.READY
LAYERS = ("layers.0", "layers.1", "head")


@pytest.fixture
def table() -> Residency:
    return Residency(LAYERS, Tracer())


class Stop:
    """The `stop` of a request. The wait calls it with the table's lock held, and lets go of the lock only to wait."""

    def __init__(self) -> None:
        self._calls = threading.Semaphore(0)
        self.error: Exception | None = None

    def __call__(self) -> None:
        self._calls.release()
        if self.error is not None:
            raise self.error

    def await_call(self) -> None:
        """Return when the wait has looked (once more) and found nothing."""
        assert self._calls.acquire(timeout=SOON_S)


def leased(table: Residency, layer: str, stop: Callable[[], None]) -> object:
    with table.lease(layer, stop=stop) as event:
        return event


# --- states ---------------------------------------------------------------------------------------------------------


def test_a_layer_is_empty_then_loading_then_ready(table: Residency) -> None:
    assert table.states() == dict.fromkeys(LAYERS, EMPTY)
    table.reserve("layers.0")
    assert table.states()["layers.0"] is LOADING
    table.publish("layers.0")
    assert table.states() == {"layers.0": READY, "layers.1": EMPTY, "head": EMPTY}
    assert [table.is_ready(layer) for layer in LAYERS] == [True, False, False]


def test_states_keep_the_order_of_use_and_are_a_copy(table: Residency) -> None:
    table.publish("head")
    states = table.states()
    states["layers.0"] = READY
    assert list(table.states().items()) == [("layers.0", EMPTY), ("layers.1", EMPTY), ("head", READY)]


def test_all_is_ready_when_the_last_layer_is_and_not_after_one_was_evicted(table: Residency) -> None:
    for layer in ("head", "layers.0", "layers.0"):  # twice the same counts once
        table.publish(layer)
    assert not table.all_ready()
    table.publish("layers.1")
    assert table.all_ready()
    table.evict("layers.1")
    assert not table.all_ready()
    assert table.states()["layers.1"] is EMPTY


def test_callbacks_hear_every_change_in_order_from_when_they_asked(table: Residency) -> None:
    heard: list[tuple[str, str, LayerState]] = []
    table.reserve("layers.0")
    table.on_change(lambda layer, state: heard.append(("first", layer, state)))
    table.on_change(lambda layer, state: heard.append(("second", layer, state)))
    table.publish("layers.0")
    table.reserve("layers.1")
    table.evict("layers.0")
    assert heard == [
        (who, layer, state)
        for layer, state in (("layers.0", READY), ("layers.1", LOADING), ("layers.0", EMPTY))
        for who in ("first", "second")
    ]


def test_a_callback_may_ask_the_table(table: Residency) -> None:
    seen: list[LayerState] = []
    table.on_change(lambda layer, state: seen.append(table.states()[layer]))
    table.publish("head")
    assert seen == [READY]


# --- leases ---------------------------------------------------------------------------------------------------------


def test_a_ready_layers_lease_gives_its_event_at_once(table: Residency) -> None:
    event = object()
    table.publish("layers.0", event=event)
    assert leased(table, "layers.0", Stop()) is event


def test_a_lease_waits_until_its_own_layer_is_ready(table: Residency) -> None:
    stop = Stop()
    waiting = in_background(lambda: leased(table, "layers.1", stop))
    stop.await_call()
    table.publish("layers.0")  # another's readiness wakes it, and it waits on
    stop.await_call()
    assert not waiting.done()
    table.publish("layers.1", event="moment")
    assert waiting.result(SOON_S) == "moment"


def test_a_leased_layer_is_not_evicted(table: Residency) -> None:
    table.publish("layers.0")
    with table.lease("layers.0", stop=Stop()), table.lease("layers.0", stop=Stop()):
        with pytest.raises(RuntimeError, match=r"^layer layers\.0 is in use and cannot be evicted$"):
            table.evict("layers.0")
        table.publish("layers.1")
        table.evict("layers.1")  # another's lease does not matter
    assert table.is_ready("layers.0")
    table.evict("layers.0")
    assert table.states()["layers.0"] is EMPTY


def test_a_lease_ends_when_its_block_fails(table: Residency) -> None:
    table.publish("layers.0")
    with pytest.raises(ZeroDivisionError), table.lease("layers.0", stop=Stop()):
        _ = 1 // 0
    table.evict("layers.0")


def test_rows_can_be_used_before_their_layer_is_ready(table: Residency) -> None:
    stop = Stop()
    table.publish_rows("head", "lm_head.weight", 10)
    table.lease_rows("head", "lm_head.weight", 10, stop=stop)  # does not wait
    waiting = in_background(lambda: table.lease_rows("head", "lm_head.weight", 11, stop=stop))
    stop.await_call()
    table.publish_rows("head", "model.norm.weight", 64)
    stop.await_call()
    assert not waiting.done()
    table.publish_rows("head", "lm_head.weight", 20)
    waiting.result(SOON_S)


def test_all_rows_are_there_once_the_layer_is(table: Residency) -> None:
    stop = Stop()
    waiting = in_background(lambda: table.lease_rows("head", "lm_head.weight", 1000, stop=stop))
    stop.await_call()
    table.publish("head")
    waiting.result(SOON_S)


def test_rows_of_an_evicted_layer_are_gone(table: Residency) -> None:
    table.publish_rows("head", "lm_head.weight", 10)
    table.publish("head")
    table.evict("head")
    stop = Stop()
    stop.error = KeyError("it waits")
    with pytest.raises(KeyError, match="it waits"):
        table.lease_rows("head", "lm_head.weight", 10, stop=stop)


# --- waits that end -------------------------------------------------------------------------------------------------


def test_an_error_wakes_whoever_waits_with_that_very_error(table: Residency) -> None:
    error, stops = LayerLoadError("layers.1", "read", "w", "gone"), [Stop(), Stop()]
    waiting: list[Future[Any]] = [
        in_background(lambda: leased(table, "layers.1", stops[0])),
        in_background(lambda: table.lease_rows("head", "lm_head.weight", 1, stop=stops[1])),
        in_background(lambda: table.wait("head")),
    ]
    for stop in stops:
        stop.await_call()
    table.close(error)
    assert [future.exception(SOON_S) for future in waiting] == [error, error, error]
    assert table.error is error


def test_a_closed_table_says_which_layer_was_awaited(table: Residency) -> None:
    table.close(StreamClosedError("the model was closed"))
    words = r"^the model was closed while layer head was awaited$"
    with pytest.raises(StreamClosedError, match=words):
        leased(table, "head", Stop())
    with pytest.raises(StreamClosedError, match=words):
        table.wait("head", 0)


def test_the_first_error_stays(table: Residency) -> None:
    first = LayerLoadError("layers.0", "slice", "w", "broken")
    table.close(first)
    table.close(StreamClosedError("the model was closed"))
    with pytest.raises(LayerLoadError) as caught:
        table.wait("layers.0")
    assert caught.value is first


def test_what_is_ready_can_be_used_after_the_load_failed(table: Residency) -> None:
    table.publish("layers.0", event="moment")
    table.close(LayerLoadError("layers.1", "read", "w", "gone"))
    assert table.wait("layers.0") is True
    assert leased(table, "layers.0", Stop()) == "moment"


def test_a_request_that_is_cancelled_ends_its_wait_when_woken(table: Residency) -> None:
    stop = Stop()
    waiting = in_background(lambda: leased(table, "layers.0", stop))
    stop.await_call()
    stop.error = KeyError("cancelled")
    table.wake()
    assert waiting.exception(SOON_S) is stop.error


def test_wait_says_no_after_its_time_and_yes_when_it_comes(table: Residency) -> None:
    assert table.wait("layers.0", timeout=0) is False
    assert table.wait("layers.0", timeout=0.01) is False
    waiting = in_background(lambda: table.wait("layers.0"))
    table.publish("layers.0")
    assert waiting.result(SOON_S) is True
    assert table.wait("layers.0", timeout=0) is True


# --- stalls ---------------------------------------------------------------------------------------------------------


class Clock:
    """time.monotonic as the test says."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("streaming.residency.time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def test_a_wait_is_booked_on_the_stages_in_which_the_missing_layer_was(clock: Clock) -> None:
    tracer, stop = Tracer(), Stop()
    table = Residency(LAYERS, tracer)
    waiting = in_background(lambda: leased(table, "layers.1", stop))
    stop.await_call()
    for at_s, stage in ((102.0, "slice"), (105.0, "quantize"), (105.5, "read")):
        clock.now_s = at_s
        table.mark("layers.1", stage)
        stop.await_call()
    clock.now_s = 109.0
    table.publish("layers.1")
    waiting.result(SOON_S)
    assert table.stalls == {"read": 2.0 + 3.5, "slice": 3.0, "quantize": 0.5}
    spans = [(s.lane, s.name, s.layer, s.start_s, s.end_s) for s in tracer.spans()]
    assert spans == [
        ("stall", "read", "layers.1", 100.0, 102.0),
        ("stall", "slice", "layers.1", 102.0, 105.0),
        ("stall", "quantize", "layers.1", 105.0, 105.5),
        ("stall", "read", "layers.1", 105.5, 109.0),
    ]


def test_being_woken_for_nothing_does_not_cut_a_stall_in_pieces(clock: Clock) -> None:
    tracer, stop = Tracer(), Stop()
    table = Residency(LAYERS, tracer)
    waiting = in_background(lambda: leased(table, "head", stop))
    stop.await_call()
    for at_s in (101.0, 102.0):
        clock.now_s = at_s
        table.wake()
        stop.await_call()
    clock.now_s = 103.0
    table.publish("head")
    waiting.result(SOON_S)
    assert [(span.start_s, span.end_s) for span in tracer.spans()] == [(100.0, 103.0)]
    assert table.stalls == {"read": 3.0}


def test_a_lease_that_does_not_wait_is_no_stall(clock: Clock, table: Residency) -> None:
    table.publish("head")
    leased(table, "head", Stop())
    assert table.stalls == {}

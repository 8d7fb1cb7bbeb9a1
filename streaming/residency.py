"""The residency table: which layers are in memory, and the one place where the forward pass waits.

The loader publishes (in plan order), the forward thread leases. This is the only object that crosses threads; one lock
guards it. Everything that can end the wait of a forward thread comes through here: a layer that is ready, an error of
the loader, a model that is closed, a request that is cancelled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

from streaming.errors import StreamClosedError
from streaming.trace import Tracer


class LayerState(Enum):
    """How far a layer is."""

    EMPTY = "empty"
    LOADING = "loading"
    READY = "ready"


class Residency:
    """States of all layers. `ready` means: read, cut, converted, quantized, post-processed, visible to the compute."""

    def __init__(
        self,
        layers: Sequence[str],
        tracer: Tracer,
        *,
        check: Callable[[str], None] = lambda layer: None,
        agree: Callable[[str], None] | None = None,
    ) -> None:
        """`check(layer)` is called at each lease, and raises when the layer's memory is no longer what was loaded.

        `agree(layer)`: of a run on several ranks. A layer that is published stays unready until `confirm` says that all
        ranks have it; this is called to tell them that this one has.
        """
        self._check, self._agree = check, agree
        self._held: set[str] = set()  # published here, and perhaps not yet by the other ranks
        self._others_loaded = agree is None
        self._through: set[int] = set()  # ranks that have computed all their layers once
        self.marks = 0  # how often the load has come on by a stage
        self._states = dict.fromkeys(layers, LayerState.EMPTY)
        self._stages = dict.fromkeys(layers, "read")
        self._unready = len(layers)
        self._finished = False
        self.first_ready_s: float | None = None  # when the first layer became ready, on the monotonic clock
        self._events: dict[str, Any] = {}
        self._rows: dict[tuple[str, str], int] = {}
        self._leases = dict.fromkeys(layers, 0)
        self._units: set[str] = set()  # streamed weights that are there
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._callbacks: list[Callable[[str, LayerState], None]] = []
        self._tracer = tracer
        self.stalls: dict[str, float] = {}

    # --- the loader's side

    def reserve(self, layer: str) -> None:
        """The layer's memory is set aside and its first bytes are on their way."""
        self._set(layer, LayerState.LOADING)

    def mark(self, layer: str, stage: str) -> None:
        """The earliest item of the layer that is not ready is in this stage now (what a waiting forward is told)."""
        with self._changed:
            self.marks += 1
            if layer not in self._held:
                self._stages[layer] = stage
                self._changed.notify_all()

    def publish_rows(self, layer: str, param: str, rows: int) -> None:
        """The first `rows` rows of one of the layer's parameters are in their place and may be used."""
        with self._changed:
            self._rows[layer, param] = rows
            self._changed.notify_all()

    def publish_unit(self, layer: str, unit: str) -> None:
        """A weight of the layer that is streamed has arrived: it is there until it is withdrawn."""
        with self._changed:
            self._units.add(unit)
            self._changed.notify_all()

    def withdraw_unit(self, unit: str) -> None:
        """Its memory is used for another one."""
        with self._changed:
            self._units.discard(unit)

    def publish(self, layer: str, *, event: Any = None) -> None:
        """The whole layer is in its place. `event` is what a device's compute stream must wait for, if anything."""
        with self._changed:
            self._events[layer] = event
            if self._agree is not None:
                self._held.add(layer)
                self._stages[layer] = "other ranks"
        if self._agree is None:
            self._set(layer, LayerState.READY)
        else:
            self._agree(layer)

    def confirm(self, layer: str) -> None:
        """Every rank has published the layer: it is ready."""
        self._set(layer, LayerState.READY)

    def hold_for(self, layer: str, rank: int) -> None:
        """A layer that is published here waits for this rank: a wait is booked under "rank N"."""
        with self._changed:
            if layer in self._held:
                self._stages[layer] = f"rank {rank}"
                self._changed.notify_all()

    def others_loaded(self) -> None:
        """Every other rank has loaded all that it has."""
        with self._changed:
            self._others_loaded = True
            self._changed.notify_all()

    def evict(self, layer: str) -> None:
        """The layer's memory is given back; refused while it is leased."""
        with self._changed:
            if self._leases[layer]:
                raise RuntimeError(f"layer {layer} is in use and cannot be evicted")
            self._rows = {key: rows for key, rows in self._rows.items() if key[0] != layer}
        self._set(layer, LayerState.EMPTY)

    def finish(self) -> None:
        """Nothing is left to do for the load, its last checks included."""
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def close(self, error: BaseException) -> None:
        """Wake whoever waits with `error`; the first one stays."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _set(self, layer: str, state: LayerState) -> None:
        with self._changed:
            if self._states[layer] is state:
                return
            if (self._states[layer] is LayerState.READY) != (state is LayerState.READY):
                self._unready += -1 if state is LayerState.READY else 1
            self._states[layer] = state
            if state is LayerState.READY and self.first_ready_s is None:
                self.first_ready_s = time.monotonic()
            callbacks = list(self._callbacks)
            self._changed.notify_all()
        for callback in callbacks:
            callback(layer, state)

    # --- the forward's side

    @contextmanager
    def lease(self, layer: str, *, stop: Callable[[], None]) -> Iterator[Any]:
        """Wait until the layer is ready and keep it while the block runs; gives the event to wait for, or None.

        `stop` is called whenever the wait is disturbed, and raises when the request is cancelled.
        """
        self._await(layer, lambda: self._states[layer] is LayerState.READY, stop)
        self._check(layer)
        with self._changed:
            self._leases[layer] += 1
            event = self._events.get(layer)
        try:
            yield event
        finally:
            with self._changed:
                self._leases[layer] -= 1

    def lease_rows(self, layer: str, param: str, rows: int, *, stop: Callable[[], None]) -> None:
        """Wait until the first `rows` rows of a parameter are there; they stay until the layer is evicted."""
        self._await(layer, lambda: self._rows.get((layer, param), 0) >= rows or self.is_ready(layer), stop)
        self._check(layer)

    def lease_unit(self, layer: str, unit: str, *, stop: Callable[[], None]) -> None:
        """Wait until a streamed weight is there; who asked for it keeps it from being withdrawn."""
        self._await(layer, lambda: unit in self._units, stop)

    def note_through(self, rank: int) -> None:
        """The rank has computed all its layers once: what it sends from now on comes within a step."""
        with self._changed:
            self._through.add(rank)
            self._changed.notify_all()

    def await_through(self, rank: int, *, layer: str, stop: Callable[[], None]) -> None:
        """Wait until that is so; the wait is booked on `layer`, the next one here. Raises as `lease` does."""
        begin = time.monotonic()
        with self._changed:
            while rank not in self._through:
                self._raise_if_closed(layer)
                stop()
                self._changed.wait()
            self._stalled(layer, f"rank {rank}", begin)

    def wake(self) -> None:
        """Make every waiting thread look again (at its own reason to stop)."""
        with self._changed:
            self._changed.notify_all()

    def _await(self, layer: str, done: Callable[[], bool], stop: Callable[[], None]) -> None:
        with self._changed:
            stage, begin = self._stages[layer], time.monotonic()
            while not done():
                self._raise_if_closed(layer)
                stop()
                self._changed.wait()
                if self._stages[layer] != stage:
                    self._stalled(layer, stage, begin)
                    stage, begin = self._stages[layer], time.monotonic()
            self._stalled(layer, stage, begin)

    def _stalled(self, layer: str, stage: str, begin: float) -> None:
        """Book the time since `begin` on the stage in which the layer was."""
        now = time.monotonic()
        if now - begin > _SHORTEST_STALL_S:
            self.book(layer, stage, begin_s=begin, end_s=now)

    def book(self, layer: str, stage: str, *, begin_s: float, end_s: float) -> None:
        """The forward pass has waited for a stage, or for another rank: counted, and a span of the trace."""
        self.stalls[stage] = self.stalls.get(stage, 0.0) + end_s - begin_s
        self._tracer.add("stall", stage, start_s=begin_s, end_s=end_s, layer=layer)

    def _raise_if_closed(self, layer: str) -> None:
        if isinstance(self._error, StreamClosedError):
            raise StreamClosedError(f"the model was closed while layer {layer} was awaited")
        if self._error is not None:
            raise self._error

    # --- whoever asks

    @property
    def error(self) -> BaseException | None:
        """Why loading ended early, if it did."""
        return self._error

    def states(self) -> dict[str, LayerState]:
        """The state of every layer, in the order of use."""
        with self._changed:
            return dict(self._states)

    def is_ready(self, layer: str) -> bool:
        """Whether the layer is ready now."""
        return self._states[layer] is LayerState.READY

    def all_ready(self) -> bool:
        """Whether nothing is left to load."""
        return self._unready == 0

    def wait(self, layer: str, timeout: float | None = None) -> bool:
        """Block until the layer is ready: True, or False after `timeout` seconds. Raises what ended the load."""
        return self._wait(lambda: self._states[layer] is LayerState.READY, layer, timeout)

    def wait_finished(self, timeout: float | None = None) -> bool:
        """Block until the whole load is over: True, or False after `timeout` seconds. Raises what ended the load."""
        return self._wait(lambda: self._finished, "head", timeout)

    def wait_everywhere(self) -> None:
        """Block until every layer is ready and the other ranks have loaded theirs. Raises what ended the load."""
        self._wait(lambda: self._unready == 0 and self._others_loaded, "head", None)

    def _wait(self, done: Callable[[], bool], layer: str, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not done():
                self._raise_if_closed(layer)
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def on_change(self, callback: Callable[[str, LayerState], None]) -> None:
        """Call `callback(layer, state)` at every change from now on, in the loader's thread (on several ranks, also in
        the one that hears of the others): it must be short."""
        with self._changed:
            self._callbacks.append(callback)


_SHORTEST_STALL_S = 0.0005

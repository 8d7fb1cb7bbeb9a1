"""`--moe-load routed_first`: experts are loaded when tokens are routed to them, the others once the first token is out.

The forward thread says which experts a layer needs (`needed`) and waits in the residency table, as for a layer. A few
threads load units (streaming.expert_plan): first what is needed, then, layer by layer, the rest. Each unit is loaded
once, by whoever takes it first, through the same stages as any item, so its bits do not depend on the order. When all
experts of a layer are there, its entry in the table ("layers.3.experts") is ready.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from streaming.accounts import Accounts
from streaming.device import Device
from streaming.errors import StreamClosedError
from streaming.expert_cache import ExpertCache
from streaming.expert_fetching import ExpertFetcher, StoredUnits
from streaming.expert_plan import FETCHING_THREADS, ExpertLayer
from streaming.hooks import Hooks
from streaming.item_bytes import open_item_bytes
from streaming.prepare import Prepared
from streaming.residency import Residency
from streaming.trace import Tracer
from streaming.weight_checks import WeightChecks
from streaming.workers import Workers

PATIENCE_S = 0.2  # of idleness, after which the rest is loaded: a request, or its second token, would have begun
FILLING_THREADS = 2  # of those that load: the others are free for what a token needs now

Unit = tuple[str, int]  # the experts' layer, and the unit's number there


@dataclass
class ExpertLoader:
    """Loads the experts of one model. `needed` and `computing` are the forward thread's; threads start with `start`."""

    layers: Sequence[ExpertLayer]
    fetcher: ExpertFetcher
    residency: Residency
    patience_s: float = PATIENCE_S
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._of_param = {param.name: layer for layer in self.layers for param in layer.plan.spec.params}
        self._by_name = {layer.plan.name: layer for layer in self.layers}
        self._absent = {layer.plan.name: set(layer.units) for layer in self.layers}  # and nobody loads them
        self._undone = {layer.plan.name: len(layer.units) for layer in self.layers}
        self._unready = len(self.layers)
        self._rest = deque((layer.plan.name, unit) for layer in self.layers for unit in layer.units)
        self._urgent: deque[Unit] = deque()
        self._accounts = Accounts(layer.plan.spec for layer in self.layers)
        self._workers = Workers(self.residency)
        self._changed = self._workers.changed
        self._noting = threading.Lock()  # of accounts, which know no threads
        self._filling = self._passes = 0
        self._idle_since_s = 0.0  # of the model: when the layers were there, or the last pass ended
        self._base_is_loaded = self._computed = self._followed = False

    # --- the forward's side

    @property
    def is_done(self) -> bool:
        """Whether every expert is there."""
        return self._unready == 0

    def needed(self, param: str, experts: Sequence[int], *, stop: Callable[[], None]) -> Iterator[int]:
        """These experts of the parameter's layer, each when it is there; those that are not are loaded before others.

        Raises what ended the load, and what `stop` raises.
        """
        layer = self._of_param[param]
        name, units = layer.plan.name, sorted({layer.unit_of(expert) for expert in experts})
        if self._undone[name] == 0:
            return iter(experts)
        with self._changed:
            for unit in units:
                if unit in self._absent[name]:
                    self._absent[name].remove(unit)
                    self._urgent.append((name, unit))
            self._changed.notify_all()
        return self._arriving(layer, experts, stop)

    def _arriving(self, layer: ExpertLayer, experts: Sequence[int], stop: Callable[[], None]) -> Iterator[int]:
        before = None
        for expert in experts:
            if (unit := layer.unit_of(expert)) != before:
                self.residency.lease_rows(layer.plan.name, _key(unit), 1, stop=stop)
                before = unit
            yield expert

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around a pass of the model: until the first one is over, nothing is loaded but what it needs."""
        with self._changed:
            self._passes += 1
            self._followed = self._followed or self._computed  # the first token is out: another one is asked for
            self._changed.notify_all()
        try:
            yield
            self._computed = True
        finally:
            with self._changed:
                self._passes -= 1
                self._idle_since_s = self.clock()
                self._changed.notify_all()

    def facts(self) -> dict[str, int | float]:
        """None: experts stay."""
        return {}

    # --- the loader's side

    def start(self) -> None:
        """Begin to load what is needed."""
        self._workers.start(FETCHING_THREADS, name="firstlayer-experts", take=self._take, carry_out=self._carry_out)

    def base_loaded(self) -> None:
        """The layers without their experts are there: the rest may be loaded when no first pass is under way."""
        with self._changed:
            self._base_is_loaded, self._idle_since_s = True, self.clock()
            self._changed.notify_all()

    def wait(self) -> bool:
        """Block until every expert is there: True, or False when the loader was closed before. Raises the error that
        ended it."""
        return self._workers.wait_until(lambda: self.is_done)

    def close(self) -> None:
        """Begin nothing more, and leave what is being read."""
        self._workers.stop()
        self.fetcher.items.cancel()

    def join(self) -> None:
        """Wait for the threads' end; only after `close`."""
        self._workers.join()
        self.fetcher.items.close()

    def _carry_out(self, taken: tuple[Unit, bool]) -> None:
        (name, unit), filling = taken
        try:
            self._load(self._by_name[name], unit)
        finally:
            with self._changed:
                self._filling -= filling
                self._changed.notify_all()

    def _take(self) -> tuple[Unit, bool] | None:
        """The next unit to load, and whether it is one of the rest; None at the end."""
        with self._changed:
            while not (self._workers.stopped or self.is_done):
                if self._urgent:
                    return self._urgent.popleft(), False
                if self._may_fill() and (unit := self._next_of_rest()) is not None:
                    self._filling += 1
                    return unit, True
                self._changed.wait(self._patience_left())
            return None

    def _may_fill(self) -> bool:
        if not self._base_is_loaded or self._filling >= FILLING_THREADS:
            return False
        return self._followed or (not self._passes and self._patience_left() is None)

    def _patience_left(self) -> float | None:
        """Seconds until the rest is loaded although nobody computes; None where no time changes anything."""
        if not self._base_is_loaded or self._followed or self._passes:
            return None
        left = self._idle_since_s + self.patience_s - self.clock()
        return left if left > 0 else None

    def _next_of_rest(self) -> Unit | None:
        while self._rest:
            name, unit = self._rest.popleft()
            if unit in self._absent[name]:
                self._absent[name].remove(unit)
                return name, unit
        return None

    # --- one unit

    def _load(self, layer: ExpertLayer, unit: int) -> None:
        self.residency.reserve(layer.plan.name)
        self.fetcher.fetch(layer, unit, running=self._check_running)
        self._publish(layer, unit)

    def _check_running(self) -> None:
        if self._workers.stopped:
            raise StreamClosedError("the model was closed while its experts were loaded")

    def _publish(self, layer: ExpertLayer, unit: int) -> None:
        name = layer.plan.name
        with self._noting:
            for item in layer.items_of(unit):
                self._accounts.note(item)
        with self._changed:
            self._undone[name] -= 1
            whole = self._undone[name] == 0
        self.residency.publish_rows(name, _key(unit), 1)
        if whole:
            self._accounts.check(name)
            self.residency.publish(name)
            for stage in ("read", "quantize", "publish"):
                nbytes = layer.plan.read_nbytes if stage == "read" else layer.plan.kept_nbytes
                seconds = self.fetcher.seconds.get((name, stage), 0.0)
                self.fetcher.hooks.on_stage(name, stage, nbytes, seconds)
            with self._changed:
                self._unready -= 1


def _key(unit: int) -> str:
    """A unit's name in the residency table."""
    return f"unit {unit}"


def open_experts(
    prepared: Prepared,
    device: Device,
    residency: Residency,
    tracer: Tracer,
    *,
    hooks: Hooks,
    capacity_nbytes: int | None = None,
    stored: StoredUnits | None = None,
) -> ExpertLoader | ExpertCache:
    """The loader of a plan's experts; with a capacity they come and go within it. `stored`: where units that are made,
    not just read, are kept on disk.

    Raises CheckpointError for a file that is gone, BudgetError for a capacity that holds no unit.
    """
    experts, options = prepared.plan.experts, prepared.options
    items = [item for one in experts for item in one.plan.items]
    fetcher = ExpertFetcher(
        open_item_bytes(items, prepared.checkpoint.states, again=capacity_nbytes is not None),
        device, residency, tracer, hooks=hooks, checks=WeightChecks(norm=prepared.config.norm),
        check_weights=options.check_weights, topology=prepared.topology, stored=stored,
    )  # fmt: skip
    if capacity_nbytes is None:
        return ExpertLoader(experts, fetcher, residency)
    assert device.expert_memory is not None
    return ExpertCache(experts, fetcher, device.expert_memory, residency, capacity_nbytes)

"""Experts that come and go within a capacity: those that tokens are routed to, as long as they are worth their memory.

The forward thread says which experts a layer needs (`needed`), and is given each when it is there; it stays until the
next is asked for. A few threads fetch units (streaming.expert_plan): first what is needed, in the order in which it is
computed; then what the next layer is thought to need (`foresee`); then, while the model is idle, others into room that
is free. Who goes is the policy's choice (streaming.expert_policy), but never what is computed now, and what this layer
or a foreseen one needs only where there is no other.

A layer whose tokens need more experts than there is room for is computed all the same: those that are needed last make
room for those that are needed first, and come again behind them. So one unit's room is enough, and nothing waits in a
circle: the unit that is computed next is fetched first, and whatever else is in memory goes, or goes once it has come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from streaming.errors import BudgetError, StreamClosedError
from streaming.expert_fetching import ExpertFetcher, name_of
from streaming.expert_memory import ExpertMemory
from streaming.expert_outlook import Outlook
from streaming.expert_plan import FETCHING_THREADS, ExpertLayer
from streaming.expert_policy import EvictionPolicy, ExpectedUse, Unit
from streaming.residency import Residency
from streaming.sizes import format_size
from streaming.workers import Workers

PATIENCE_S = 0.2  # of idleness, after which free room is filled
FILLING_THREADS = 2  # of those that fetch: the others are free for a request that begins


@dataclass
class ExpertCounts:
    """What became of the units so far. Of those that a visit of a layer needed: `hits` were there, `misses` were not.
    Of those fetched because they were foreseen: `foreseen_used`, `foreseen_wasted`. `read_nbytes`: read from files;
    `held_nbytes` and `peak_nbytes`: of memory in whole pages, now and at the most."""

    hits: int = 0
    misses: int = 0
    evicted: int = 0
    foreseen_used: int = 0
    foreseen_wasted: int = 0
    read_nbytes: int = 0
    held_nbytes: int = 0
    peak_nbytes: int = 0


@dataclass
class ExpertCache:
    """The experts of one model. `needed`, `foresee` and `computing` are the forward thread's; threads start with
    `start`. Raises BudgetError where the capacity does not hold the largest unit."""

    layers: Sequence[ExpertLayer]
    fetcher: ExpertFetcher
    memory: ExpertMemory
    residency: Residency
    capacity_nbytes: int
    policy: EvictionPolicy | None = None
    patience_s: float = PATIENCE_S
    clock: Callable[[], float] = time.monotonic
    counts: ExpertCounts = field(default_factory=ExpertCounts)
    outlook: Outlook = field(default_factory=Outlook)

    def __post_init__(self) -> None:
        self._sizes = [[layer.unit_nbytes(unit) for unit in layer.units] for layer in self.layers]
        self._check_capacity(self.capacity_nbytes)
        self._policy = self.policy or ExpectedUse(len(self.layers))
        self._of_param = {p.name: number for number, one in enumerate(self.layers) for p in one.plan.spec.params}
        most = max(len(layer.units) for layer in self.layers)
        self._rest = [(n, u) for u in range(most) for n, layer in enumerate(self.layers) if u < len(layer.units)]
        self._present: set[Unit] = set()
        self._busy: set[Unit] = set()  # on their way, or being written to the stored cache
        self._wanted: list[Unit] = []  # of the layer that is computed, from the unit in use on
        self._foreseen: list[Unit] = []
        self._guessed: set[Unit] = set()  # those of them that were absent then
        # The layer that was asked for last, and when, later by what was waited since.
        self._visit = (len(self.layers), 0.0)
        self._early: set[Unit] = set()  # fetched because they were foreseen, and their layer has not come yet
        self._workers = Workers(self.residency)
        self._changed = self._workers.changed
        self._filling = self._passes = 0
        self._idle_since_s = 0.0
        self._base_is_loaded = False

    # --- the forward's side

    @property
    def is_done(self) -> bool:
        """Never: experts are asked for as long as the model runs."""
        return False

    def needed(self, param: str, experts: Sequence[int], *, stop: Callable[[], None]) -> Iterator[int]:
        """These experts of the parameter's layer, in the order of their numbers, each when it is there; it stays until
        the next one is asked for. Ask for all of them before any other layer's.

        Raises what ended the load, and what `stop` raises.
        """
        number = self._of_param[param]
        layer = self.layers[number]
        wanted = [(number, unit) for unit in sorted({layer.unit_of(expert) for expert in experts})]
        before, since_s = self._visit
        if before < number:
            self.outlook.computed(self.clock() - since_s)
        self._visit = (number, self.clock())
        with self._changed:
            self._policy.visit(number, [unit for _, unit in wanted])
            self._count(number, wanted)
            self._wanted = wanted
            self._changed.notify_all()
        return self._arriving(layer, sorted(experts), wanted, stop)

    def foresee(self, param: str, experts: Sequence[int]) -> None:
        """The next layer is thought to need these, the likeliest first: they are spared, and those that are absent
        fetched while nothing else is, where that pays (streaming.expert_outlook)."""
        number = self._of_param[param]
        units = dict.fromkeys(self.layers[number].unit_of(expert) for expert in experts)
        with self._changed:
            self._foreseen = [(number, unit) for unit in units]
            self._guessed = {unit for unit in self._foreseen if self._is_absent(unit)}
            self._changed.notify_all()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around a pass of the model: meanwhile free room is left to what it needs."""
        with self._changed:
            self._passes += 1
        try:
            yield
        finally:
            with self._changed:
                self._passes -= 1
                self._idle_since_s = self.clock()
                self._changed.notify_all()

    def _count(self, number: int, wanted: Sequence[Unit]) -> None:
        hits = sum(unit in self._present for unit in wanted)
        self.counts.hits += hits
        self.counts.misses += len(wanted) - hits
        came = {unit for unit in self._early if unit[0] == number}
        used = len(came.intersection(wanted))
        self.counts.foreseen_used += used
        self.counts.foreseen_wasted += len(came) - used
        self._early -= came
        if self._foreseen and self._foreseen[0][0] == number:
            self.outlook.came_true(len(self._guessed.intersection(wanted)), len(self._guessed))
            self._foreseen, self._guessed = [], set()

    def _arriving(
        self, layer: ExpertLayer, experts: Sequence[int], wanted: list[Unit], stop: Callable[[], None]
    ) -> Iterator[int]:
        try:
            for expert in experts:
                unit = layer.unit_of(expert)
                if wanted[0][1] != unit:
                    with self._changed:
                        del wanted[0]
                        self._changed.notify_all()
                if wanted[0] not in self._present:  # the first of them is never made to go
                    begin_s = self.clock()
                    self.residency.lease_unit(layer.plan.name, name_of(layer, unit), stop=stop)
                    number, since_s = self._visit
                    self._visit = (number, since_s + self.clock() - begin_s)
                yield expert
        finally:
            with self._changed:
                wanted.clear()
                self._changed.notify_all()

    # --- whoever runs it

    def facts(self) -> dict[str, int | float]:
        """For the summary: the counts so far (see ExpertCounts), bytes allowed, and `hit_rate`, the share of the units
        asked for that were there."""
        with self._changed:
            counts = replace(self.counts)
            capacity = self.capacity_nbytes
        asked = counts.hits + counts.misses
        return {
            "capacity_bytes": capacity, "peak_bytes": counts.peak_nbytes, "read_bytes": counts.read_nbytes,
            "hits": counts.hits, "misses": counts.misses, "hit_rate": counts.hits / asked if asked else 1.0,
            "evicted": counts.evicted, "foreseen_used": counts.foreseen_used,
            "foreseen_wasted": counts.foreseen_wasted,
        }  # fmt: skip

    def start(self) -> None:
        """Begin to fetch what is needed."""
        self._workers.start(FETCHING_THREADS, name="firstlayer-experts", take=self._take, carry_out=self._fetch)

    def base_loaded(self) -> None:
        """The layers without their experts are there: the load is over."""
        for layer in self.layers:
            self.residency.publish(layer.plan.name)
        with self._changed:
            self._base_is_loaded, self._idle_since_s = True, self.clock()
            self._changed.notify_all()

    def wait(self) -> bool:
        """Block until the load is over: True, or False when the cache was closed before. Raises the error that ended
        it."""
        return self._workers.wait_until(lambda: self._base_is_loaded)

    def set_capacity(self, nbytes: int) -> None:
        """Let experts have so much memory from now on; returns once no more is held. Not from the forward thread while
        it computes a layer. Raises BudgetError where the largest unit does not fit."""
        self._check_capacity(nbytes)
        with self._changed:
            self.capacity_nbytes = nbytes
            while not (self._workers.stopped or self._make_room(0, behind=0)):
                self._changed.notify_all()  # of those that went some may be wanted again
                self._changed.wait()
            self._changed.notify_all()

    def close(self) -> None:
        """Begin nothing more, and leave what is being read."""
        self._workers.stop()
        self.fetcher.items.cancel()

    def join(self) -> None:
        """Wait for the threads' end; only after `close`."""
        self._workers.join()
        self.fetcher.items.close()

    def _check_capacity(self, nbytes: int) -> None:
        least = max(size for sizes in self._sizes for size in sizes)
        if nbytes < least:
            raise BudgetError(
                f"{format_size(nbytes)} for experts are too little: the largest that are loaded together take "
                f"{format_size(least)}"
            )

    # --- the fetching threads

    def _take(self) -> Unit | None:
        """The next unit to fetch, with its memory taken; None at the end."""
        with self._changed:
            while not self._workers.stopped:
                if (unit := self._next()) is not None:
                    size = self._sizes[unit[0]][unit[1]]
                    self.memory.take(self.layers[unit[0]].plan.name, unit[1])
                    self._busy.add(unit)
                    self.counts.held_nbytes += size
                    self.counts.peak_nbytes = max(self.counts.peak_nbytes, self.counts.held_nbytes)
                    return unit
                self._changed.wait(self._patience_left())
            return None

    def _fetch(self, unit: Unit) -> None:
        number, one = unit
        layer = self.layers[number]
        begin_s = self.clock()
        fetched = self.fetcher.fetch(layer, one, running=self._check_running)
        with self._changed:
            self.outlook.fetched(self.clock() - begin_s)
            self._present.add(unit)
            self._policy.add(unit)
            self.counts.read_nbytes += fetched.nbytes
            self.residency.publish_unit(layer.plan.name, name_of(layer, one))
        if fetched.made:
            self.fetcher.keep(layer, one)
        with self._changed:
            self._busy.discard(unit)
            self._changed.notify_all()

    def _check_running(self) -> None:
        if self._workers.stopped:
            raise StreamClosedError("the model was closed while its experts were loaded")

    # --- what is fetched, and what goes for it

    def _next(self) -> Unit | None:
        """A unit that is to be fetched and has room now."""
        for place, unit in enumerate(self._wanted):
            if self._is_absent(unit):
                return unit if self._make_room(self._size(unit), behind=place) else None
        if self.outlook.pays and not self._busy:
            for unit in self._foreseen:
                if self._is_absent(unit) and self._make_room(self._size(unit), behind=None):
                    self._early.add(unit)
                    return unit
        return self._next_of_rest() if self._may_fill() else None

    def _next_of_rest(self) -> Unit | None:
        free = self.capacity_nbytes - self.counts.held_nbytes
        absent = (unit for unit in self._rest if self._is_absent(unit))
        return next((unit for unit in absent if self._size(unit) <= free), None)

    def _may_fill(self) -> bool:
        if not self._base_is_loaded or self._passes or self._patience_left() is not None:
            return False
        return len(self._busy) < FILLING_THREADS and len(self._present) < len(self._rest)

    def _patience_left(self) -> float | None:
        """Seconds until free room is filled; None where no time changes anything."""
        if not self._base_is_loaded or self._passes:
            return None
        left = self._idle_since_s + self.patience_s - self.clock()
        return left if left > 0 else None

    def _size(self, unit: Unit) -> int:
        return self._sizes[unit[0]][unit[1]]

    def _is_absent(self, unit: Unit) -> bool:
        return unit not in self._present and unit not in self._busy

    def _make_room(self, nbytes: int, *, behind: int | None) -> bool:
        """Whether so many bytes are free, once others have gone. `behind`: for the unit at this place of those that are
        wanted, for which foreseen ones go too, and wanted ones behind it."""
        while self.counts.held_nbytes + nbytes > self.capacity_nbytes:
            victim = self._policy.victim({*self._wanted, *self._foreseen, *self._busy})
            if victim is None and behind is not None:
                last = (*self._wanted[behind + 1 :], *self._foreseen)
                victim = next((u for u in reversed(last) if self._may_go(u)), None)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _may_go(self, unit: Unit) -> bool:
        return unit in self._present and unit not in self._busy

    def _evict(self, unit: Unit) -> None:
        layer = self.layers[unit[0]]
        self._present.discard(unit)
        self._policy.remove(unit)
        self.residency.withdraw_unit(name_of(layer, unit[1]))
        self.memory.give_back(layer.plan.name, unit[1])
        self.counts.held_nbytes -= self._size(unit)
        self.counts.evicted += 1
        if unit in self._early:
            self._early.discard(unit)
            self.counts.foreseen_wasted += 1

"""Weights that do not all fit: some stay, the others pass through a ring of memory, round and round.

The forward thread leases a unit (streaming.stream_plan) for the length of one product; it waits in the residency table,
as for a layer. A few threads bring the units in the order of use, from one pass to the next: when a pass has used its
last one, the first of the next pass are there already.

Why it cannot deadlock: room is given in the order of use, units are given back as they are used, and a unit that is
wanted now but is not on its way (a pass was cancelled, or which weights stay has changed) makes the threads give up
what they hold ahead and begin anew there. So the unit that is waited for never waits for one behind it; and any unit
fits into an empty ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

from quant.row_parts import RowParts
from streaming.device import own_memory
from streaming.errors import StreamClosedError
from streaming.file_views import give_pages_back
from streaming.load_plan import LoadItem
from streaming.residency import Residency
from streaming.ring import Ring
from streaming.stream_plan import MAKING_THREADS, StreamPlan, Unit
from streaming.unit_loading import Stored, UnitLoading
from streaming.unit_memory import CpuUnits, Place, UnitMemory
from streaming.units_in_place import UnitsInPlace
from streaming.workers import Workers


@dataclass(eq=False)
class _Entry:
    """A unit that is there or on its way. `todo`: its items nobody has taken; `left`: those that are not there yet."""

    unit: Unit
    place: Place
    offset: int | None  # in the ring; None: memory of its own, which it keeps
    todo: deque[tuple[LoadItem, ...]]
    left: int
    may_be_made: bool  # on this machine's processors, where its stored form is not found
    users: int = 0  # the forward thread, and whoever writes it to the stored cache
    is_dropped: bool = False
    is_leaving: bool = False  # a thread gives its pages back
    is_in_place: bool = False  # the forward thread sets up its pages, and gives them back


Job = tuple[_Entry, tuple[LoadItem, ...] | None]
"""A unit, and items of it to load; None: its pages are to be given back."""


@dataclass
class StreamCounts:
    """What the stream has done so far: units that the forward pass found in memory that they keep (`kept`) and those
    that passed through (`streamed`), their bytes, of which some lay `in_place` (see streaming.units_in_place), and
    bytes that came and were not used."""

    kept: int = 0
    streamed: int = 0
    streamed_nbytes: int = 0
    in_place_nbytes: int = 0
    unused_nbytes: int = 0


@dataclass(eq=False)
class WeightStream:
    """The units of one model. `lease` and `lease_rows` are the forward thread's; threads start with `start`.

    Units that the pipeline loads are in the modules themselves; `forget` gives such a parameter's memory back.
    """

    plan: StreamPlan
    loading: UnitLoading
    residency: Residency
    forget: Callable[[str], None]
    memory: UnitMemory = field(default_factory=CpuUnits)
    counts: StreamCounts = field(default_factory=StreamCounts)

    def __post_init__(self) -> None:
        self.units = self.plan.units
        self._index = {unit.name: index for index, unit in enumerate(self.units)}
        self._of_param = {(unit.param.name, unit.first): unit for unit in self.units}
        self._loaded = set(self.plan.loaded)
        self._memory = self.memory.take(self.plan.ring_nbytes)
        self._ring = Ring(self.plan.ring_nbytes)
        self._live: dict[str, _Entry] = {}  # in the ring, or on its way: in the order in which they were begun
        self._own: dict[str, _Entry] = {}  # those that have come to stay
        self._leaving: deque[_Entry] = deque()  # used where they lie in files: their pages go before their room
        self._in_place = UnitsInPlace()
        self._used_in_place = 0
        self._is_ring_bare = False
        self._next = self._making = 0
        self._users: dict[str, int] = {}  # of units that the modules have
        self._workers = Workers(self.residency)
        self._changed = self._workers.changed
        self._is_paused = False
        self._waiting = 0  # threads that wait for a unit or for memory, and are none of the workers

    # --- the forward's side

    def for_step(self, stop: Callable[[], None]) -> StepWeights:
        """The stream as one step of the forward pass is given it; `stop` raises to cancel."""
        return StepWeights(self, stop)

    def lease(self, param: str, *, stop: Callable[[], None]) -> AbstractContextManager[Stored | RowParts | None]:
        """The stored tensors of a parameter, or the parts that it is in, for the length of the block; None where the
        module has them.

        Raises what ended the stream, and what `stop` raises.
        """
        return self.lease_unit(self._of_param.get((param, 0)), stop=stop)

    @contextmanager
    def lease_rows(self, param: str, start: int, *, stop: Callable[[], None]) -> Iterator[Stored | None]:
        """The same for the unit of the head that begins with row `start`."""
        with self.lease_unit(self._of_param.get((param, start)), stop=stop) as stored:
            assert not isinstance(stored, RowParts)  # rows of one tensor
            yield stored

    @contextmanager
    def lease_unit(self, unit: Unit | None, *, stop: Callable[[], None]) -> Iterator[Stored | RowParts | None]:
        """The same of any unit."""
        if unit is None:
            yield None
            return
        entry = self._claim(unit)
        try:
            if entry is not None:
                if not entry.is_in_place:
                    self.residency.lease_unit(unit.layer, unit.name, stop=stop)
                self.memory.lease(entry.place)
            yield None if entry is None else entry.place.leased
        finally:
            self._release(unit, entry)

    def _claim(self, unit: Unit) -> _Entry | None:
        with self._changed:
            if unit.name in self._loaded:
                self._users[unit.name] = self._users.get(unit.name, 0) + 1
                self.counts.kept += 1
                return None
            entry = self._sought(unit)
            entry.users += 1
            self._used_in_place += entry.is_in_place
            if entry.offset is None and not entry.is_in_place:
                self.counts.kept += 1
            else:
                self.counts.streamed += 1
                self.counts.streamed_nbytes += unit.nbytes
                self.counts.in_place_nbytes += unit.nbytes * entry.is_in_place
            return entry

    def _sought(self, unit: Unit) -> _Entry:
        """The unit, there to stay or on its way. What was begun before it is given up: it was passed over, and no pass
        comes back to it. Where the unit is not on its way all is given up, and begun anew with it."""
        while True:
            self._raise_if_ended()
            if (own := self._own.get(unit.name)) is not None:  # it may have come while an earlier load was given up
                return own
            entry = self._live.get(unit.name)
            wanted = entry is not None and not entry.is_dropped
            for other in list(self._live.values()):
                if wanted and other is entry:
                    break
                self._drop(other)
            if entry is not None and wanted:
                return entry
            if (place := self._lying(unit)) is not None:
                return _Entry(unit, place, None, deque(), 0, False, is_in_place=True)
            self._next = self._index[unit.name]
            if self._begin():
                self._wake()
            else:
                self._wait()

    def _lying(self, unit: Unit) -> Place | None:
        """The place of a unit that is used where it lies; None where it comes through the ring, or has to wait."""
        if self._is_paused:
            return None
        if not self._is_in_place() or any(entry.offset is not None for entry in self._live.values()):
            return None
        if not self._is_ring_bare:  # nobody writes there, and what is left of it would count beside the pages of maps
            self._is_ring_bare = True
            give_pages_back(self._memory)
        place = self._in_place.use(unit)
        if place is None:  # threads bring all again
            self.loading.viewed.clear()
            self._changed.notify_all()
        return place

    def _is_in_place(self) -> bool:
        """Whether nothing is brought any more: all that passes through lies where it is used, all else is there."""
        if self._in_place.is_on:
            return True
        plan, viewed = self.plan, self.loading.viewed
        if len(viewed) < len(plan.streamed) or plan.kept - self._loaded - self._own.keys():
            return False
        return self._in_place.begin(plan.streamed, viewed, room_nbytes=plan.ring_nbytes)

    def _drop(self, entry: _Entry) -> None:
        if entry.users or entry.offset is None or entry.is_dropped:
            return
        entry.left -= len(entry.todo)
        entry.todo.clear()
        entry.is_dropped = True
        self.counts.unused_nbytes += entry.unit.nbytes
        self._free_dropped(entry)

    def _free_dropped(self, entry: _Entry) -> None:
        """Give a dropped unit's memory back, once nobody writes to it any more."""
        if entry.left == 0 and not entry.users and self._live.get(entry.unit.name) is entry:
            self._free(entry)

    def _free(self, entry: _Entry) -> None:
        if entry.is_leaving:
            return
        self.residency.withdraw_unit(entry.unit.name)
        self.memory.leave(entry.place)
        if entry.place.views:  # a worker's: it takes the system as long as a small product takes
            entry.is_leaving = True
            self._leaving.append(entry)
        else:
            self._give_room(entry)
        self._wake()

    def _give_room(self, entry: _Entry) -> None:
        assert entry.offset is not None
        del self._live[entry.unit.name]
        self._ring.free(entry.offset)

    def _wake(self) -> None:
        """One worker finds something to do; who waits for memory looks as well."""
        if self._waiting:
            self._changed.notify_all()
        else:
            self._changed.notify()

    def _tell(self) -> None:
        """There is nothing to do for a worker."""
        if self._waiting:
            self._changed.notify_all()

    def _wait(self, done: Callable[[], bool] | None = None) -> None:
        """For any change, or until something is so or the threads have been stopped; not a worker's."""
        self._waiting += 1
        try:
            if done is None:
                self._changed.wait()
            else:
                self._changed.wait_for(lambda: self._workers.stopped or done())
        finally:
            self._waiting -= 1

    def _release(self, unit: Unit, entry: _Entry | None) -> None:
        if entry is not None:
            entry.place.leave()
        with self._changed:
            if entry is None:
                self._users[unit.name] -= 1
            elif entry.is_in_place:
                self._used_in_place -= 1
            else:
                entry.users -= 1
                if entry.offset is not None:
                    self.memory.used()
                    entry.is_dropped = True  # it goes as soon as nobody writes it to the stored cache any more
                    entry.left -= len(entry.todo)  # where the wait for it was given up
                    entry.todo.clear()
                    self._free_dropped(entry)
            self._tell()

    # --- who stays

    @property
    def held_nbytes(self) -> int:
        """Bytes of the ring and of all units that stay, whether they are there or on their way."""
        with self._changed:
            return self._held()

    def _held(self) -> int:
        coming = [entry.unit for entry in self._live.values() if entry.offset is None]
        here = [unit for unit in self.units if unit.name in self._loaded or unit.name in self._own]
        return self.plan.ring_nbytes + sum(unit.nbytes for unit in (*coming, *here))

    def change(self, plan: StreamPlan) -> None:
        """From now on the units stay that this plan keeps. Others give their memory back before this returns (one that
        is used right now behind its product); new ones stay when they come by in the next pass. Where the plan has
        another ring, what is in the old one is given up."""
        with self._changed:
            self._stop_in_place()
            if plan.ring_nbytes not in (0, self.plan.ring_nbytes):
                self._replace_ring(plan.ring_nbytes)
            self.plan = plan if plan.ring_nbytes else replace(plan, ring_nbytes=self.plan.ring_nbytes)
            going = [unit for unit in self.units if unit.name not in plan.kept]
            self._wait(lambda: all(self._evict(unit) for unit in going))
            self._raise_if_ended()
            self.memory.change(self.plan)
            self._changed.notify_all()

    def _stop_in_place(self) -> None:
        """Nothing is used where it lies until all of it came by again; a unit that is used now has left behind this."""
        self._is_paused = True
        try:
            self._wait(lambda: not self._used_in_place)
            self._in_place.end()
        finally:
            self._is_paused = False
            self._changed.notify_all()
        self._raise_if_ended()

    def _replace_ring(self, nbytes: int) -> None:
        """Nothing is begun until the old one is empty; a unit that is used leaves it behind its product."""
        self._is_paused = True
        try:
            places = [entry.place for entry in self._live.values() if entry.offset is not None]
            self._wait(self._is_ring_empty)
            self._raise_if_ended()
            for place in places:
                self.memory.give_back(place)
            places.clear()
            self._memory = own_memory(0)  # the old one goes before there is a new one
            self._memory, self._ring = self.memory.take(nbytes), Ring(nbytes)
        finally:
            self._is_paused = False
            self._changed.notify_all()

    def _is_ring_empty(self) -> bool:
        """Whether nothing is left of it; what nobody uses is dropped."""
        for entry in list(self._live.values()):
            self._drop(entry)
        return all(entry.offset is None for entry in self._live.values())

    def _evict(self, unit: Unit) -> bool:
        """Give the memory of a unit back that does not stay any more; False while it is used."""
        if unit.name in self._loaded:
            return self._evict_loaded(unit.param.name)
        coming = self._live.get(unit.name)
        if coming is not None and coming.offset is None:
            return False
        entry = self._own.get(unit.name)
        if entry is None:
            return True
        if entry.users:
            return False
        self.residency.withdraw_unit(unit.name)
        self.memory.give_back(entry.place)
        del self._own[unit.name]
        return True

    def _evict_loaded(self, param: str) -> bool:
        """All units of a parameter that the pipeline has loaded as one; the module has nothing then."""
        names = {unit.name for unit in self.units if unit.param.name == param} & self._loaded
        if any(self._users.get(name, 0) for name in names):
            return False
        self._loaded -= names
        self.forget(param)
        return True

    # --- the loader's side

    def start(self) -> None:
        """Begin to bring units."""
        self._workers.start(
            self.memory.threads, name="firstlayer-stream", take=self._take, carry_out=lambda job: self._carry_out(*job)
        )

    def close(self) -> None:
        """Begin nothing more, and leave what is being read."""
        self._workers.stop()
        self.loading.cancel()

    def join(self) -> None:
        """Wait for the threads' end; only after `close`."""
        self._workers.join()
        self.loading.close()
        self.memory.close()
        for entry in self._live.values():
            entry.place.let_go()
        self._live.clear()
        self._own.clear()
        self._leaving.clear()
        self._in_place.end()
        self._memory = own_memory(0)

    def _take(self) -> Job | None:
        """What is to be done next; None at the end."""
        with self._changed:
            while not self._workers.stopped:
                if (job := self._next_job()) is not None:
                    return job
                if not self._begin():
                    self._changed.wait()
            return None

    def _next_job(self) -> Job | None:
        if self._leaving:
            return self._leaving.popleft(), None
        for entry in self._live.values():
            if entry.todo and (not entry.may_be_made or self._making < MAKING_THREADS):
                self._making += entry.may_be_made
                return entry, entry.todo.popleft()
        return None

    def _begin(self) -> bool:
        """Set memory aside for the unit that comes next; False where there is none, or no room."""
        unit = self._upcoming()
        if self._is_paused or unit is None or self._is_in_place() or not self.memory.has_room(unit):
            return False
        if unit.name in self.plan.kept:
            offset, memory = None, self.memory.take(unit.nbytes)
        else:
            offset = self._ring.place(unit.nbytes)
            if offset is None:
                return False
            memory, self._is_ring_bare = self._memory[offset : offset + unit.nbytes], False
        self.loading.begin(unit)
        place = self.memory.place(unit, memory)
        place.passes = offset is not None
        todo = deque((unit.items,) if place.is_filled else self.loading.jobs(unit, place))
        self._live[unit.name] = _Entry(unit, place, offset, todo, len(todo), not (unit.is_straight or place.is_filled))
        self._next = self._index[unit.name] + 1
        if not self.loading.was_viewed(unit):  # else it takes no time: another worker would only be in the way
            self._wake()
        return True

    def _upcoming(self) -> Unit | None:
        """The unit behind the last one begun that is not there and not on its way; None where every one is."""
        count = len(self.units)
        for step in range(count):
            unit = self.units[(self._next + step) % count]
            if unit.name in self._live:
                return None  # once round: what is behind it comes when it has been used
            if unit.name not in self._loaded and unit.name not in self._own:
                return unit
        return None

    def _carry_out(self, entry: _Entry, items: tuple[LoadItem, ...] | None) -> None:
        if items is None:
            self._let_go(entry)
        else:
            self._load(entry, items)

    def _let_go(self, entry: _Entry) -> None:
        try:
            entry.place.let_go()
        finally:
            with self._changed:
                self._give_room(entry)
                self._tell()  # this worker looks for what may come into the room itself

    def _load(self, entry: _Entry, items: tuple[LoadItem, ...]) -> None:
        try:
            self.loading.load(entry.unit, items, entry.place)
        finally:
            with self._changed:
                self._making -= entry.may_be_made
                entry.left -= 1
                is_whole = entry.left == 0 and not entry.is_dropped
                entry.users += is_whole  # until it is written to the stored cache, where it is
                if entry.is_dropped:
                    self._free_dropped(entry)
                if entry.may_be_made:
                    self._wake()
                self._tell()
        if is_whole:
            self._finish(entry)

    def _finish(self, entry: _Entry) -> None:
        try:
            self.loading.settle(entry.unit, entry.place)
            self.memory.arrive(entry.unit, entry.place)
            with self._changed:
                if entry.offset is None:
                    self._own[entry.unit.name] = self._live.pop(entry.unit.name)
                self.residency.publish_unit(entry.unit.layer, entry.unit.name)
            self.memory.landed(entry.unit, entry.place)
            self.loading.keep(entry.unit, entry.place.landed)
        finally:
            with self._changed:
                self.memory.leave(entry.place)
                entry.users -= 1
                if not entry.users and entry.is_dropped:
                    self._free_dropped(entry)
                self._tell()

    def _raise_if_ended(self) -> None:
        if self.residency.error is not None:
            raise self.residency.error
        if self._workers.stopped:
            raise StreamClosedError("the model was closed")


@dataclass(frozen=True)
class StepWeights:
    """A stream as one step of the forward pass sees it (layers.context.StreamedWeights)."""

    stream: WeightStream
    stop: Callable[[], None]

    def lease(self, param: str) -> AbstractContextManager[Stored | RowParts | None]:
        """See WeightStream."""
        return self.stream.lease(param, stop=self.stop)

    def lease_rows(self, param: str, start: int, stop: int) -> AbstractContextManager[Stored | None]:
        """See WeightStream."""
        return self.stream.lease_rows(param, start, stop=self.stop)

"""How one unit of the streamed weights (streaming.stream_plan) comes into memory, whatever memory that is.

A unit whose stored form lies in the files is read to its place. Another is made of its items once, as any load makes
it; its stored form is written to the cache on disk then and read from there ever after, so that nothing is quantized
twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from layers.parallel import SingleGroup
from layers.topology import Topology
from layers.weights import LayerSpec
from streaming.accounts import Accounts
from streaming.device import Device
from streaming.file_runs import FileRun
from streaming.file_views import Came, FileView, FileViews
from streaming.item_bytes import ItemBytes
from streaming.item_storing import ItemStoring, at_stage, wide_numbers
from streaming.item_words import log_item
from streaming.load_plan import LoadItem
from streaming.residency import Residency
from streaming.stages import item_views
from streaming.stream_plan import Unit
from streaming.trace import Tracer
from streaming.unit_memory import Place
from streaming.weight_checks import WeightChecks

logger = logging.getLogger(__name__)
TIMED_NBYTES = 1 << 20  # of reads that are timed
RATED_NBYTES = 256 << 20  # the last bytes that came, of which is said how
MEMORY_RATE = 1 << 30  # bytes a second of one thread: page caches give several times as much, most disks less
Stored = Mapping[str, torch.Tensor]


class StoredForms(Protocol):
    """Where stored forms are kept once they have been made (streaming.stored_cache)."""

    def load(self, unit: str, into: Stored, *, past: bool = False) -> bool:
        """Fill the tensors; False where the unit is not there, or not what was written. `past`: past the page cache."""
        ...

    def view(self, unit: str, like: Stored, *, before: Callable[[], None]) -> Mapping[str, FileView] | None:
        """The tensors where they lie in the page cache; None where they have to be loaded. `before` is called before
        there are pages of them."""
        ...

    def put(self, unit: str, tensors: Stored) -> None:
        """Keep the unit; nothing where it cannot be."""
        ...

    def drop_behind(self, unit: str) -> None:
        """Tell the system that the unit's bytes are not worth keeping in its page cache."""
        ...

    def close(self) -> None:
        """Give back what was opened."""
        ...


@dataclass(eq=False)
class UnitLoading:
    """Loads units of one model, from any thread. `drop_behind`: what is read is not worth keeping in the page cache,
    since more is read before it is read again than the page cache holds; what was there before stays. `maps`: what
    passes through, and is in the page cache, is used where it lies. `maps_forms`: stored forms in the cache on disk
    too, whose file no lease keeps whole."""

    items: ItemBytes
    device: Device
    residency: Residency
    tracer: Tracer
    checks: WeightChecks
    warn: Callable[[str], None]
    check_weights: bool = False
    drop_behind: bool = False
    maps: bool = False
    maps_forms: bool = False
    forms: StoredForms | None = None
    topology: Topology = field(default_factory=Topology)

    def __post_init__(self) -> None:
        self._copied_share = 0.0  # of the last bytes that came, those that a processor has copied
        self._noting = threading.Lock()  # of accounts and checks, which know no threads
        self._accounts: dict[str, Accounts] = {}  # of units that come for the first time
        self._seen: set[str] = set()  # units that have come whole
        self._kept: set[str] = set()  # and of which the stored form is on disk
        self.viewed: dict[str, FileViews] = {}  # of units that were used where they lie when they came the last time

    @property
    def copies(self) -> bool:
        """Whether most of what is read is copied from memory, not from a disk: then it is a processor that reading
        takes."""
        return self._copied_share > 0.5

    def begin(self, unit: Unit) -> None:
        """The unit is about to be loaded, from its first item on: what an earlier load had of it was given up."""
        if self._accounts:
            with self._noting:
                self._accounts.pop(unit.name, None)

    def was_viewed(self, unit: Unit) -> bool:
        """Whether all of the unit was used where it lies in the page cache when it came the last time."""
        return unit.name in self.viewed

    def jobs(self, unit: Unit, place: Place) -> list[tuple[LoadItem, ...]]:
        """What `load` is given of a unit, each from any thread: item by item where it is read."""
        if len(unit.items) == 1 or not unit.is_straight or self._comes_whole(unit, place):
            return [unit.items]
        return [(item,) for item in unit.items]

    def load(self, unit: Unit, items: Sequence[LoadItem], place: Place) -> None:
        """Bring some items of a unit, or all that it is made of, to its place: what is read lands on the host, what is
        made is made where it is computed with.

        Raises LayerLoadError (layer, stage, tensor), StreamClosedError.
        """
        if place.is_filled:
            return
        if unit.is_straight:
            whole = len(items) == len(unit.items) and self._may_be_viewed(unit, place)
            viewed = self._view(unit, place) if whole else frozenset[str]()
            for item in items:
                if item.stored_name not in viewed:
                    self._read(unit, item, place.landed)
                elif unit.name not in self._seen:
                    log_item(item, topology=self.topology)
                    self._note(unit, item)
        elif not self._read_kept(unit, place):
            self._make(unit, items, place)

    def settle(self, unit: Unit, place: Place) -> None:
        """The unit is whole: what is wrong with its numbers is said the first time. Raises LayerLoadError."""
        with self._noting:
            if unit.name in self._seen:
                return
            self._seen.add(unit.name)
            with ExitStack() as behind:
                if place.views is not None:
                    behind.callback(place.views.enter())
                for item in unit.items if unit.is_straight else ():
                    self.checks.add(item, *_numbers_of(item, place))
            if (accounts := self._accounts.pop(unit.name, None)) is not None:
                accounts.check()
            with self.device.working():
                self.checks.settle(strict=self.check_weights, warn=self.warn)

    def keep(self, unit: Unit, tensors: Stored) -> None:
        """Write the stored form of a unit to the cache, if that is worth while and it is not there."""
        if self.forms is None or not unit.is_worth_keeping or unit.name in self._kept:
            return
        begin_s = time.monotonic()
        self.forms.put(unit.name, tensors)
        if self.drop_behind:
            self.forms.drop_behind(unit.name)
        self._kept.add(unit.name)
        self.tracer.add("keep", unit.name, start_s=begin_s, end_s=time.monotonic(), layer=unit.layer)

    def cancel(self) -> None:
        """Make whoever reads in another thread leave soon."""
        self.items.cancel()

    def close(self) -> None:
        """Give back what was opened."""
        self.viewed.clear()
        self.items.close()
        if self.forms is not None:
            self.forms.close()
        self.warn = logger.warning  # what it was may refer to the model, whose memory goes with its last user

    # --- one unit

    def _may_be_viewed(self, unit: Unit, place: Place) -> bool:
        return self.maps and place.passes and bool(unit.file_runs)

    def _comes_whole(self, unit: Unit, place: Place) -> bool:
        """Whether all that may be viewed is in the page cache, or comes there."""
        if not self._may_be_viewed(unit, place):
            return False
        runs = (run for several in unit.file_runs.values() for run in several)
        return self.was_viewed(unit) or all(self.items.may_view(run, reads=not self.drop_behind) for run in runs)

    def _view(self, unit: Unit, place: Place) -> frozenset[str]:
        """Use the stored tensors where they lie in the page cache, those of which it has all: which these are."""
        begin_s = time.monotonic()
        self.residency.mark(unit.layer, "read")
        all_runs = unit.file_runs.items()
        found = {name: came for name, runs in all_runs if (came := self._come(unit, runs, place))}
        last = self.viewed.pop(unit.name, None)
        if found:
            of = {name: tuple(one.view for one in came) for name, came in found.items()}
            views = last if last is not None and last.of == of else FileViews(of, unit.storage)
            was_cached = all(one.was_cached for came in found.values() for one in came)
            if was_cached and len(found) == len(unit.storage):
                self.viewed[unit.name] = views
            self._take_views(unit, place, views, begin_s, was_cached=was_cached)
        return frozenset(found)

    def _come(self, unit: Unit, runs: Sequence[FileRun], place: Place) -> tuple[Came, ...]:
        """The views of all these runs; () where any is not to be had."""
        found: list[Came] = []
        for run in runs:
            came = self.items.view(unit.first_of(run), run, before=place.spare, reads=not self.drop_behind)
            if came is None:
                for other in found:
                    other.view.go()
                return ()
            found.append(came)
        return tuple(found)

    def _take_views(
        self, unit: Unit, place: Place, views: FileViews, begin_s: float, *, was_cached: bool = True
    ) -> None:
        place.take_views(views)
        self._rate(views.nbytes, is_copied=False)
        self.tracer.add("map" if was_cached else "read", unit.name, start_s=begin_s, end_s=time.monotonic(),
                        layer=unit.layer, args={"nbytes": views.nbytes})  # fmt: skip

    def _rate(self, nbytes: int, *, is_copied: bool) -> None:
        weight = min(1.0, nbytes / RATED_NBYTES)
        self._copied_share += (is_copied - self._copied_share) * weight

    def _read(self, unit: Unit, item: LoadItem, tensors: Stored) -> None:
        (view,) = item_views(item, tensors).values()
        if unit.name not in self._seen:
            log_item(item, topology=self.topology)
        with self._stage(item, "read", nbytes=item.read_nbytes):
            self._bring(item, view)
        if unit.name not in self._seen:
            self._note(unit, item)

    def _read_kept(self, unit: Unit, place: Place) -> bool:
        tensors = place.landed
        if self.forms is None or not unit.is_worth_keeping:
            return False
        self.residency.mark(unit.layer, "read")
        begin_s = time.monotonic()
        if self.maps_forms and place.passes and (views := self.forms.view(unit.name, tensors, before=place.spare)):
            of = {name: (view,) for name, view in views.items()}
            self._take_views(unit, place, FileViews(of, unit.storage), begin_s)
            self._kept.add(unit.name)
            return True
        if not self.forms.load(unit.name, tensors, past=self.drop_behind):
            self._kept.discard(unit.name)
            return False
        self._kept.add(unit.name)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self.tracer.add("read", unit.name, start_s=begin_s, end_s=time.monotonic(), layer=unit.layer,
                        args={"nbytes": nbytes})  # fmt: skip
        return True

    def _make(self, unit: Unit, items: Sequence[LoadItem], place: Place) -> None:
        storing = ItemStoring(SingleGroup().maximum)
        self.device.hold_back(place.behind)
        place.is_made = True
        for item in items:
            if unit.name not in self._seen:
                log_item(item, topology=self.topology)
            with self._stage(item, "read", nbytes=item.read_nbytes):
                raw = self._bring(item, None)
            with self._stage(item, "slice"), self.device.working():
                wide = wide_numbers(item, raw, self.device, place.stored)
            if unit.name not in self._seen:
                self._note(unit, item)
                with self._noting, self.device.working():
                    self.checks.add(item, wide)
            with self._stage(item, "quantize"), self.device.working():
                storing.store(item, wide, place.stored)
                del wide  # on the stream that it belongs to

    def _bring(self, item: LoadItem, into: torch.Tensor | None) -> torch.Tensor:
        return self.items.read_by(item, into) if self.drop_behind else self.items.read(item, into)

    def _note(self, unit: Unit, item: LoadItem) -> None:
        with self._noting:
            accounts = self._accounts.get(unit.name)
            if accounts is None:
                accounts = self._accounts[unit.name] = Accounts([LayerSpec(unit.layer, (unit.param,))])
            accounts.note(item)

    @contextmanager
    def _stage(self, item: LoadItem, stage: str, **args: int) -> Iterator[None]:
        """See `at_stage`; reads are timed."""
        begin_s = time.monotonic()
        with at_stage(item, stage, residency=self.residency, tracer=self.tracer, args=args):
            yield
        if stage == "read" and item.read_nbytes >= TIMED_NBYTES:
            rate = item.read_nbytes / max(1e-6, time.monotonic() - begin_s)
            self._rate(item.read_nbytes, is_copied=rate > MEMORY_RATE)


def _numbers_of(item: LoadItem, place: Place) -> Iterable[torch.Tensor]:
    """What an item that is stored as it lies has filled, on the host."""
    if place.parts is None:
        return item_views(item, place.landed).values()
    first = item.param.section_starts[item.section]
    return (place.parts[first + item.section_rows[0] : first + item.section_rows[1]],)

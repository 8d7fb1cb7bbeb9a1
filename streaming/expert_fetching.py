"""One unit of experts: from the files, or from the stored cache, to its place in memory, stage by stage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from layers.parallel import SingleGroup
from layers.topology import Topology
from streaming.device import Device
from streaming.expert_plan import ExpertLayer
from streaming.hooks import Hooks
from streaming.item_bytes import ItemBytes
from streaming.item_storing import ItemStoring, at_stage, wide_numbers
from streaming.item_words import log_item
from streaming.load_plan import LoadItem
from streaming.residency import Residency
from streaming.stages import item_views
from streaming.trace import Tracer
from streaming.weight_checks import WeightChecks


class StoredUnits(Protocol):
    """Where the stored form of units is kept on disk, so that none is quantized twice."""

    def load(self, unit: str, into: Mapping[str, torch.Tensor]) -> bool:
        """Fill the tensors; False where the unit is not there."""
        ...

    def put(self, unit: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep the unit."""
        ...


@dataclass(frozen=True)
class Fetched:
    """How a unit came: bytes that were read for it, and whether it was `made` (not just read), so that its stored form
    is worth keeping."""

    nbytes: int
    made: bool


@dataclass
class ExpertFetcher:
    """Fetches units from any thread; `seconds`: of work so far, by (layer, stage).

    `check_weights`: a fault of the numbers is an error, not a warning.
    """

    items: ItemBytes
    device: Device
    residency: Residency
    tracer: Tracer
    hooks: Hooks = field(default_factory=Hooks)
    checks: WeightChecks = field(default_factory=WeightChecks)
    check_weights: bool = False
    topology: Topology = field(default_factory=Topology)
    stored: StoredUnits | None = None
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._noting = threading.Lock()  # of checks and seconds, which know no threads
        self._checked: set[tuple[str, int]] = set()

    def fetch(self, layer: ExpertLayer, unit: int, *, running: Callable[[], None]) -> Fetched:
        """Bring the unit to its place. `running` raises when it is no longer wanted.

        Raises LayerLoadError with layer, stage and tensor; StreamClosedError.
        """
        items = layer.items_of(unit)
        if self.stored is None or all(item.direct for item in items):
            return self._read(layer, unit, items, running)
        views = self.views(layer, unit)
        with self._stage(items[0], "read", nbytes=sum(tensor.nbytes for tensor in views.values())) as args:
            found = self.stored.load(name_of(layer, unit), views)
            if not found:
                args["nbytes"] = 0
        if found:
            return Fetched(sum(tensor.nbytes for tensor in views.values()), made=False)
        return self._read(layer, unit, items, running)

    def keep(self, layer: ExpertLayer, unit: int) -> None:
        """Keep a unit that was made in its stored form, where there is a place for that."""
        if self.stored is not None:
            self.stored.put(name_of(layer, unit), self.views(layer, unit))

    def views(self, layer: ExpertLayer, unit: int) -> dict[str, torch.Tensor]:
        """What is stored of a unit, by projection and name ("gate_up_proj.weight_scale")."""
        found = {}
        first, stop, total = layer.firsts[unit], layer.firsts[unit + 1], layer.firsts[-1]
        for run in layer.runs:
            tensor = self.device.stored[run.param][run.name]
            step = tensor.shape[0] // total
            found[f"{run.param.split('.')[-2]}.{run.name}"] = tensor[first * step : stop * step]
        return found

    def _read(self, layer: ExpertLayer, unit: int, items: tuple[LoadItem, ...], running: Callable[[], None]) -> Fetched:
        storing = ItemStoring(SingleGroup().maximum)  # the plan has no scales that ranks must agree on
        with self._noting:
            is_new = (layer.plan.name, unit) not in self._checked
        for item in items:
            running()
            self._bring(item, storing, is_new=is_new)
        if is_new:
            with self._noting, self.device.working():
                self._checked.add((layer.plan.name, unit))
                self.checks.settle(strict=self.check_weights, warn=self.hooks.warn)
        return Fetched(sum(item.read_nbytes for item in items), made=any(not item.direct for item in items))

    def _bring(self, item: LoadItem, storing: ItemStoring, *, is_new: bool) -> None:
        log_item(item, topology=self.topology)
        place = self._place(item)
        with self._stage(item, "read", nbytes=item.read_nbytes):
            raw = self.items.read(item, place)
        with self._stage(item, "slice"), self.device.working():
            wide = wide_numbers(item, raw, self.device) if place is None else place
            if is_new:
                with self._noting:
                    self.checks.add(item, wide)
        if place is not None:
            return
        with self._stage(item, "quantize"), self.device.working():
            storing.store(item, wide, self.device.stored[item.param.name])
            moment = self.device.moment()
        self.device.await_moment(moment)

    def _place(self, item: LoadItem) -> torch.Tensor | None:
        """Where the item's bytes stay, if they are kept as they are read."""
        if not item.direct:
            return None
        (view,) = item_views(item, self.device.stored[item.param.name]).values()
        return view

    @contextmanager
    def _stage(self, item: LoadItem, stage: str, **args: int) -> Iterator[dict[str, int]]:
        """See `at_stage`; its seconds are counted, also where it fails."""
        begin_s = time.monotonic()
        try:
            with at_stage(item, stage, residency=self.residency, tracer=self.tracer, args=args):
                yield args
        finally:
            with self._noting:
                key = (item.layer, stage)
                self.seconds[key] = self.seconds.get(key, 0.0) + time.monotonic() - begin_s


def name_of(layer: ExpertLayer, unit: int) -> str:
    """What a unit is called in a stored cache."""
    return f"{layer.plan.name}.{unit}"

"""Where streamed units lie while they are computed with, and how what was read gets there.

On the CPU a unit is read to where it is used. A GPU has memory of its own: there a unit comes into page-locked memory
of the host (the tier, where it stays, or staging, which it passes through), is copied on the side stream, and the
forward pass goes on meanwhile. Four orders keep that right; the host waits in none of them but the last:

- a product waits for the copy: the side stream's event behind it goes to the forward thread with the unit, and the
  compute stream waits for it before the first product of the lease (`lease`);
- a copy waits for the products that its place was used by before: the compute stream's event is recorded when the
  forward thread gives a unit back (`used`), behind all it has issued; a place is only given out when its unit was given
  back, so the last event then is behind every use of that place, and the side stream waits for it (`hold_back`);
- the allocator knows one stream for all of this, the compute stream. So the side stream waits for it before it writes
  to memory that was just taken (`take`), and it waits for the side stream before memory is given back (`give_back`);
- staging is used again, and a page lock given back, only when the copy has ended: the thread that brought the unit
  waits for the event (`landed`), while another one reads.

Nothing waits in a circle: an event of either stream depends on what was issued before it was recorded alone, and a
lease is only given for a unit whose copy has been issued.

Quantizing is the device's work, so that streamed weights have the bits of resident ones; the result is copied back for
the host's tier and the cache on disk. What a device needs done to a weight in the end (streaming.post_processing) is
done behind each copy, on the device: the host and the disk keep what was stored before it, as saved files do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from quant.post_processing import process
from quant.row_parts import RowParts
from quant.scheme import StoredSpec
from streaming.device import CudaDevice, own_memory, view_of
from streaming.file_views import FileViews, give_pages_back
from streaming.host_tier import HostTier, Landing
from streaming.post_processing import PostProcessing
from streaming.read_plan import aligned
from streaming.stream_plan import StreamPlan, Unit
from streaming.trace import Tracer

READING_THREADS = 2  # that bring units: more fill no disk better, and take a core from the products
COPYING_THREADS = 3  # with a GPU: one of them waits for its copy
Stored = Mapping[str, torch.Tensor]


@dataclass(eq=False)
class Place:
    """Memory of one unit: `stored` tensors in `memory`, that products read. `landing`: the host's memory that its bytes
    come into first; None where that is the same, or where it is made on the device and not kept."""

    memory: torch.Tensor
    storage: Mapping[str, StoredSpec]
    landing: Landing | None = None
    behind: Any = None  # the moment that whoever writes there waits for
    is_made: bool = False  # on the device, of its items
    passes: bool = False  # through the ring: nothing of it stays
    views: FileViews | None = None  # of the stored tensors that are used where they lie in their file
    moment: Any = None  # that products wait for
    issued_s: float = 0.0  # when the copy was
    is_spared: bool = False
    leave_views: Callable[[], None] | None = None  # while products of the forward thread read them

    @cached_property
    def stored(self) -> Stored:
        """What products read."""
        return stored_views(self.memory, self.storage)

    @property
    def parts(self) -> RowParts | None:
        """A wide weight that lies in several places of its file: then `stored` holds nothing."""
        return None if self.views is None else self.views.parts

    @property
    def landed(self) -> Stored:
        """The stored tensors on the host."""
        return self.stored if self.landing is None else self.landing.tensors

    @property
    def leased(self) -> Stored | RowParts:
        """What a product is given."""
        return self.stored if self.parts is None else self.parts

    def spare(self) -> None:
        """Give back, as long as maps are used in its place, the memory that was set aside for the unit: both count
        once."""
        if not self.is_spared:
            self.is_spared = True
            give_pages_back(self.memory)

    def take_views(self, views: FileViews) -> None:
        """Use these stored tensors where they lie."""
        self.views = views
        if len(views.of) == len(self.storage):
            self.stored = views.stored
        else:
            self.stored = {**self.stored, **views.stored}

    def enter(self) -> None:
        """Products are about to read it. Raises LayerLoadError where the bytes are not what they were."""
        if self.views is not None and self.leave_views is None:
            self.leave_views = self.views.enter()

    def leave(self) -> None:
        """They have read it."""
        leave, self.leave_views = self.leave_views, None
        if leave is not None:
            leave()

    def let_go(self) -> None:
        """Of the pages of maps, before the unit's room is given to another one."""
        if self.views is not None:
            self.views.go()
            self.views = None

    @property
    def is_filled(self) -> bool:
        """Whether the host has the unit already."""
        return self.landing is not None and self.landing.is_filled


class UnitMemory(Protocol):
    """Memory for the units of one stream. Whoever calls holds the stream's lock, but for `arrive`, `landed`, `lease`
    and `close`."""

    threads: int  # that bring units
    copied_nbytes: int  # from the host to the device, so far

    @property
    def held_nbytes(self) -> int:
        """Bytes of units that the host keeps, of those that are there."""
        ...

    def take(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of the memory that is computed in."""
        ...

    def give_back(self, place: Place) -> None:
        """Before the last reference to memory goes that was taken for this place alone."""
        ...

    def has_room(self, unit: Unit) -> bool:
        """Whether there is room now that the unit's bytes can come into."""
        ...

    def place(self, unit: Unit, memory: torch.Tensor) -> Place:
        """The place of a unit that begins to come into this memory; only where there is room."""
        ...

    def arrive(self, unit: Unit, place: Place) -> None:
        """The unit's bytes have landed, or it was made: from here on it may be leased."""
        ...

    def landed(self, unit: Unit, place: Place) -> None:
        """Block until what `arrive` has issued is done."""
        ...

    def leave(self, place: Place) -> None:
        """The landing is not needed any more; called once or more for every place."""
        ...

    def lease(self, place: Place) -> None:
        """Before the first product of the forward thread. Raises LayerLoadError where the bytes are not what they
        were."""
        ...

    def used(self) -> None:
        """Behind the last product: the forward thread gives a unit back."""
        ...

    def change(self, plan: StreamPlan) -> None:
        """Another plan holds from now on."""
        ...

    def close(self) -> None:
        """Give everything back; nobody calls any more."""
        ...


class CpuUnits:
    """Units are read to where they are computed with."""

    threads, copied_nbytes, held_nbytes = READING_THREADS, 0, 0

    def take(self, nbytes: int) -> torch.Tensor:
        return own_memory(nbytes)

    def give_back(self, place: Place) -> None:
        """It goes with its last tensor."""

    def has_room(self, unit: Unit) -> bool:
        return True

    def place(self, unit: Unit, memory: torch.Tensor) -> Place:
        return Place(memory, unit.storage)

    def arrive(self, unit: Unit, place: Place) -> None:
        """It is there."""

    def landed(self, unit: Unit, place: Place) -> None:
        """Nothing was issued."""

    def leave(self, place: Place) -> None:
        """There is no landing."""

    def lease(self, place: Place) -> None:
        place.enter()

    def used(self) -> None:
        """A product is done when its call returns."""

    def change(self, plan: StreamPlan) -> None:
        """The host keeps nothing else."""

    def close(self) -> None:
        """Memory goes with its last tensor."""


class GpuUnits:
    """Units on a GPU, behind the host's memory. See the module for who waits for whom."""

    threads = COPYING_THREADS

    def __init__(
        self, device: CudaDevice, plan: StreamPlan, *, processing: PostProcessing, has_forms: bool, tracer: Tracer,
        warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        """`has_forms`: units that were made are written to the cache on disk, and read from there again."""
        self._device, self._processing, self._tracer, self._has_forms = device, processing, tracer, has_forms
        self._tier = HostTier(device, plan, warn=warn)
        self._used: Any = None
        self.copied_nbytes = 0

    @property
    def held_nbytes(self) -> int:
        return self._tier.held_nbytes

    def take(self, nbytes: int) -> torch.Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch_device)
        self._device.hold_back(self._device.compute_moment())
        return memory

    def give_back(self, place: Place) -> None:
        self._device.order_after(place.moment)

    def has_room(self, unit: Unit) -> bool:
        return not self._lands(unit) or self._tier.has_room(unit)

    def place(self, unit: Unit, memory: torch.Tensor) -> Place:
        landing = self._tier.place(unit, stored_views) if self._lands(unit) else None
        return Place(memory, unit.storage, landing, self._used)

    def _lands(self, unit: Unit) -> bool:
        """Whether the unit is ever on the host in its stored form."""
        return unit.is_straight or self._tier.keeps(unit) or (self._has_forms and unit.is_worth_keeping)

    def arrive(self, unit: Unit, place: Place) -> None:
        device, landing = self._device, place.landing
        if landing is not None:
            self._tier.lock(landing)
        place.issued_s = time.monotonic()
        with device.working():
            if not place.is_made:
                assert landing is not None
                device.hold_back(place.behind)
                device.copy(place.memory, landing.memory)
            elif landing is not None:  # before it is processed: the host keeps what was stored
                device.copy(landing.memory, place.memory)
            if steps := self._processing.steps.get(unit.param.name):
                place.stored = process(place.stored, steps)
        place.moment = device.moment()

    def landed(self, unit: Unit, place: Place) -> None:
        self._device.await_moment(place.moment)
        if place.landing is None:
            return
        way = "to the host" if place.is_made else "to the GPU"
        self._tracer.add(
            "copy", unit.name, start_s=place.issued_s, end_s=time.monotonic(), layer=unit.layer,
            args={"nbytes": unit.nbytes, "way": way},
        )  # fmt: skip
        place.landing.is_filled = True

    def leave(self, place: Place) -> None:
        if place.landing is not None:
            if place.moment is not None and not place.is_made:
                self.copied_nbytes += place.memory.numel()
            self._tier.leave(place.landing)
            place.landing = None

    def lease(self, place: Place) -> None:
        self._device.order_after(place.moment)

    def used(self) -> None:
        self._used = self._device.compute_moment()

    def change(self, plan: StreamPlan) -> None:
        self._tier.change(plan)

    def close(self) -> None:
        try:
            self._device.await_moment(self._device.moment())  # no copy runs any more; nor where this fails
        finally:
            self._tier.close()
            self._used = None


def stored_views(memory: torch.Tensor, storage: Mapping[str, StoredSpec]) -> dict[str, torch.Tensor]:
    """Tensors of these specs in memory, one behind the other at aligned addresses."""
    found, offset = {}, 0
    for name, spec in storage.items():
        found[name] = view_of(memory, offset, spec)
        offset += aligned(spec.nbytes)
    return found

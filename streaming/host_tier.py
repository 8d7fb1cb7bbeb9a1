"""The host's memory between a disk and a GPU: units that stay here in their stored form, and staging for the others.

A unit that the host keeps is filled the first time it comes, and never read or quantized again. All of it is
page-locked where the system grants that (from other memory a copy goes through the driver's own buffers, at a fraction
of the speed, and the host waits for it), each unit by itself, so that what is kept can change while the model runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from quant.scheme import StoredSpec
from streaming.device import CudaDevice, own_memory
from streaming.ring import Ring
from streaming.sizes import format_size
from streaming.stream_plan import StreamPlan, Unit

ViewsOf = Callable[[torch.Tensor, Mapping[str, StoredSpec]], Mapping[str, torch.Tensor]]


@dataclass(eq=False)
class Landing:
    """The host's memory that a unit's bytes come into, as its stored tensors. `slot`: where in the staging; None: of
    its own."""

    memory: torch.Tensor
    tensors: Mapping[str, torch.Tensor]
    slot: int | None = None
    is_locked: bool = False  # whether that was tried
    is_filled: bool = False
    users: int = 0
    is_going: bool = False  # not kept any more, once nobody uses it


class HostTier:
    """The memory of one stream. To be used under one lock, but for `lock`; whoever holds a landing fills it without."""

    def __init__(self, device: CudaDevice, plan: StreamPlan, *, warn: Callable[[str], None]) -> None:
        """Takes no memory yet."""
        self._device, self._warn = device, warn
        self._names = plan.tier
        self._kept: dict[str, Landing] = {}
        self._ring = Ring(plan.staging_nbytes)
        self._staging: torch.Tensor | None = None
        self._locked: dict[int, torch.Tensor] = {}  # by address
        self._is_refused = False
        self._locking = threading.Lock()

    @property
    def held_nbytes(self) -> int:
        """Bytes of the units that are kept and there."""
        return sum(landing.memory.numel() for landing in list(self._kept.values()) if landing.is_filled)

    def keeps(self, unit: Unit) -> bool:
        """Whether the unit stays on the host."""
        return unit.name in self._names

    def has_room(self, unit: Unit) -> bool:
        """Whether the unit can be placed now."""
        return self.keeps(unit) or self._ring.has_room(unit.nbytes)

    def place(self, unit: Unit, views: ViewsOf) -> Landing:
        """Where the unit's bytes come into: its own memory, or staging, which is given back with `leave`."""
        if self.keeps(unit):
            landing = self._kept.get(unit.name)
            if landing is None:
                memory = own_memory(unit.nbytes)
                landing = self._kept[unit.name] = Landing(memory, views(memory, unit.storage))
        else:
            if self._staging is None:
                self._staging = own_memory(self._ring.capacity)
                self._lock(self._staging)
            slot = self._ring.place(unit.nbytes)
            assert slot is not None
            memory = self._staging[slot : slot + unit.nbytes]
            landing = Landing(memory, views(memory, unit.storage), slot, is_locked=True)
        landing.users += 1
        return landing

    def lock(self, landing: Landing) -> None:
        """Page-lock a landing before its first copy, without the lock of the others: it takes as long as a read."""
        if not landing.is_locked:
            landing.is_locked = True
            self._lock(landing.memory)

    def leave(self, landing: Landing) -> None:
        """The landing's bytes are on the device, or are not wanted any more; no copy runs."""
        landing.users -= 1
        if landing.slot is not None:
            self._ring.free(landing.slot)
        elif landing.is_going and not landing.users:
            self._give_back(landing.memory)

    def change(self, plan: StreamPlan) -> None:
        """Keep the units that this plan keeps. Others give their memory back, those in use when they are left."""
        self._names = plan.tier
        for name in [name for name in self._kept if name not in plan.tier]:
            landing = self._kept.pop(name)
            landing.is_going = True
            if not landing.users:
                self._give_back(landing.memory)
        if self._ring.capacity < plan.staging_nbytes and self._staging is None:
            self._ring = Ring(plan.staging_nbytes)

    def close(self) -> None:
        """Give all page locks back; no copy may be running. The memory goes with its last tensor."""
        for memory in self._locked.values():
            self._device.page_unlock(memory)
        self._locked.clear()
        self._kept.clear()
        self._staging = None

    def _lock(self, memory: torch.Tensor) -> None:
        with self._locking:
            if self._is_refused or not memory.numel():
                return
            code = self._device.page_lock(memory)
            if code == 0:
                self._locked[memory.data_ptr()] = memory
                return
            self._is_refused = True  # the next would be refused too, and each failed call costs time
        self._warn(
            f"page-locking {format_size(memory.numel())} of the host's memory failed with CUDA error {code}: weights "
            "go to the GPU by way of the driver's own buffers, slower (a smaller --host-memory may help)"
        )
        with suppress(RuntimeError):  # CUDA keeps the error for the next launch of this thread: this one takes it
            torch.empty(1, device=self._device.torch_device).fill_(1)

    def _give_back(self, memory: torch.Tensor) -> None:
        if self._locked.pop(memory.data_ptr(), None) is not None:
            self._device.page_unlock(memory)

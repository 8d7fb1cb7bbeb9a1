"""Memory for experts that come and go: address space for all of them, pages for those that are there.

A layer's experts stay the tensors that they are when all are kept, so kernels, indices and bits are the same. What a
unit (streaming.expert_plan) takes is counted in whole pages, those at its borders too, although units that lie side by
side share them: what is counted is never less than what the system gives. A page goes back when no unit needs it.
A huge page is allowed only where all of it is one unit's: elsewhere it would hold parts of experts that nobody has
counted. It is worth having, since first touch is the larger part of reading what is cached: 64 MiB into memory that was
given back 1.8 to 2.3 GB/s in small pages and 3.7 to 3.9 in huge ones, into the same memory again 5 to 6.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator, Sequence

import torch

from streaming.device import StoredTensors, view_of
from streaming.errors import BudgetError
from streaming.expert_plan import PAGE_NBYTES, ExpertLayer
from streaming.sizes import format_size

HUGE_NBYTES = 2 << 20
_MOST_HUGE_SPANS = 16384  # each is a mapping of its own to the system, which allows 65,530 (vm.max_map_count)
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux; Python names it from 3.13 on


class ExpertMemory:
    """The stored tensors of all experts; `take` before a unit's bytes are written, `give_back` when it may go."""

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        self.tensors: StoredTensors = {}
        self._maps: dict[str, mmap.mmap] = {}
        self._addresses: dict[str, int] = {}
        self._layers = {layer.plan.name: layer for layer in layers}
        self._users: dict[tuple[str, int], int] = {}  # of pages at the borders of units
        self._huge: set[tuple[str, int]] = set()  # units that have been offered huge pages
        self._huge_spans = 0
        self._lock = threading.Lock()
        for layer in layers:
            self._maps[layer.plan.name] = self._open(layer)

    def take(self, layer: str, unit: int) -> None:
        """The unit's bytes are about to be written."""
        with self._lock:
            for first, stop in self._pages(layer, unit):
                for page in {first, stop - 1}:
                    self._users[layer, page] = self._users.get((layer, page), 0) + 1
            if (layer, unit) not in self._huge:
                self._huge.add((layer, unit))
                self._offer_huge_pages(layer, unit)

    def give_back(self, layer: str, unit: int) -> None:
        """Nobody reads the unit any more: what only it needed goes back to the system, and reads as zeros."""
        with self._lock:
            for first, stop in self._pages(layer, unit):
                for page in {first, stop - 1}:
                    self._users[layer, page] -= 1
                first += self._users[layer, first] > 0
                if stop > first:
                    stop -= self._users[layer, stop - 1] > 0
                if stop > first:
                    start, nbytes = first * PAGE_NBYTES, (stop - first) * PAGE_NBYTES
                    self._maps[layer].madvise(mmap.MADV_DONTNEED, start, nbytes)

    def address_of(self, layer: str) -> tuple[int, int]:
        """Where a layer's address space begins, and its bytes."""
        return self._addresses[layer], len(self._maps[layer])

    def _offer_huge_pages(self, layer: str, unit: int) -> None:
        """For what lies between the first and the last border of huge pages in a unit."""
        for start, stop in self._layers[layer].spans(unit):
            before = -(self._addresses[layer] + start) % HUGE_NBYTES
            nbytes = (stop - start - before) // HUGE_NBYTES * HUGE_NBYTES
            if nbytes > 0 and self._huge_spans < _MOST_HUGE_SPANS:
                self._huge_spans += 1
                with contextlib.suppress(OSError, AttributeError):
                    self._maps[layer].madvise(mmap.MADV_HUGEPAGE, start + before, nbytes)

    def _pages(self, layer: str, unit: int) -> Iterator[tuple[int, int]]:
        """Runs of pages [first, stop) of the layer's address space that a unit lies in."""
        for start, stop in self._layers[layer].spans(unit):
            yield start // PAGE_NBYTES, -(-stop // PAGE_NBYTES)

    def _open(self, layer: ExpertLayer) -> mmap.mmap:
        runs = layer.runs
        nbytes = max(PAGE_NBYTES, runs[-1].offset + runs[-1].spec.nbytes)
        try:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
        except OSError as error:
            raise BudgetError(
                f"the system gives no address space of {format_size(nbytes)} for the experts of {layer.of}: {error}; "
                "see vm.overcommit_memory and ulimit -v"
            ) from error
        with contextlib.suppress(OSError, AttributeError):  # not every kernel is built with them
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._addresses[layer.plan.name] = whole.data_ptr()
        for run in runs:
            self.tensors.setdefault(run.param, {})[run.name] = view_of(whole, run.offset, run.spec)
        return memory

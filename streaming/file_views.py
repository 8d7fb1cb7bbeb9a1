"""A run of a file used where it lies in the system's page cache: pages of a map, for as long as a product needs them.

Copying out of the cache takes a core as long as multiplying takes it (5 GB/s a core measured, against 80 to 800 for
setting up the pages of a map and taking them away), and the bytes are in memory twice. The price is that of every map,
see streaming.kept_maps.

What the cache does not have may be read through the map: then the system keeps it there in pages of 2 MiB where it can,
and reads of a few MiB leave small ones. It is the passes behind that gain, by the pages' set-up and by the products
(measured for 8 GB: 10 ms in place of 100, and 0.45 s in place of 0.91 for a whole pass).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from quant.dtypes import to_torch
from quant.row_parts import RowParts
from quant.scheme import StoredSpec
from streaming.device import view_of, whole_pages
from streaming.kept_maps import private_map
from streaming.page_cache import is_cached

MADV_POPULATE_READ = 22  # Linux 5.14: all pages at once; elsewhere they come one by one, as they are touched
_EINVAL = 22
_LIBRARY = ctypes.CDLL(None, use_errno=True)


Leave = Callable[[], None]


def _nobody_writes() -> bool:
    """Of a file that nobody else has."""
    return True


@dataclass(frozen=True, eq=False)
class FileView:
    """`memory`: uint8 [nbytes], the bytes of `file`, wherever they are: reading them brings their pages back. `enter`
    raises when the file is not what it was: to be called right before the bytes are used; what it gives, if anything,
    is to be called behind that. `may_be_used`: whether nobody is known to write to the file."""

    memory: torch.Tensor
    file: Hashable
    enter: Callable[[], Leave | None]
    may_be_used: Callable[[], bool] = _nobody_writes

    def come(self) -> bool:
        """Set up the pages; False where the file has none behind some of them, or they cannot be read."""
        address, nbytes = self.pages
        done = _LIBRARY.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), MADV_POPULATE_READ) == 0
        return done or ctypes.get_errno() == _EINVAL

    def go(self) -> None:
        """Take the pages away again, and with them what counts as this process's memory."""
        _take_away(*self.pages)

    @cached_property
    def pages(self) -> tuple[int, int]:
        """Where the pages begin that any of the bytes is in, and how many bytes they are."""
        begin = self.memory.data_ptr()
        start = begin // mmap.PAGESIZE * mmap.PAGESIZE
        return start, -(-(begin + self.memory.numel() - start) // mmap.PAGESIZE) * mmap.PAGESIZE


class Came(NamedTuple):
    """A view that has its pages, and whether the page cache had them."""

    view: FileView
    was_cached: bool


class FileViews:
    """The views of one unit: those of each of its stored tensors, in the order of its rows."""

    def __init__(self, of: Mapping[str, Sequence[FileView]], storage: Mapping[str, StoredSpec]) -> None:
        """`storage`: of the tensors; only a wide weight, which is a unit's only tensor, lies in several runs."""
        self.of = of
        self.all = tuple(view for several in of.values() for view in several)
        self.nbytes = sum(view.memory.numel() for view in self.all)
        self.stored = {
            name: view_of(views[0].memory, 0, storage[name]) for name, views in of.items() if len(views) == 1
        }
        apart = [name for name, views in of.items() if len(views) > 1]
        self.parts = RowParts([_rows(view.memory, storage[apart[0]]) for view in of[apart[0]]]) if apart else None
        self._files = tuple({view.file: view for view in reversed(self.all)}.values())

    @property
    def may_be_used(self) -> bool:
        """Whether nobody is known to write to any of the files."""
        return all(view.may_be_used() for view in self._files)

    def enter(self) -> Leave:
        """Begin to use the bytes. Gives what is to be called behind that; raises where a file is not what it was."""
        with ExitStack() as leaves:
            for view in self._files:
                if (leave := view.enter()) is not None:
                    leaves.callback(leave)
            return leaves.pop_all().close

    def go(self) -> None:
        """Take the pages away."""
        go_together(self.all)


def _rows(memory: torch.Tensor, spec: StoredSpec) -> torch.Tensor:
    """The rows of a stored tensor [O, I] that lie there."""
    return memory.view(to_torch(spec.dtype)).view(-1, *spec.shape[1:])


def map_run(descriptor: int, offset: int, nbytes: int) -> torch.Tensor | None:
    """uint8 [nbytes], a map of a file from `offset` on, that has no pages yet; None where it cannot be mapped."""
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        memory = private_map(descriptor, offset + nbytes - start, offset=start)
    except (OSError, ValueError):  # what the map would not take, a read says in its own words
        return None
    with suppress(OSError, AttributeError):  # a hint; not every kernel is built with them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[offset - start :]


def view_run(
    view: FileView, descriptor: int, offset: int, *, before: Callable[[], None], reads: bool = False
) -> Came | None:
    """The view, which lies at `offset` of a file, with its pages; None where the page cache has not all of it: with
    `reads` it is read then, and None where it cannot be. `before` is called right before there are pages of it: to give
    others back, so that both count once."""
    was_cached = is_cached(descriptor, offset, view.memory.numel())
    if not (was_cached or reads):
        return None
    before()
    return Came(view, was_cached) if view.come() else None


def go_together(views: Iterable[FileView]) -> None:
    """Take the pages of several views away, those of neighbours with one call."""
    for start, nbytes in joined(view.pages for view in views):
        _take_away(start, nbytes)


def joined(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs (start, length) as few as they can be: what overlaps or touches is one."""
    found: list[tuple[int, int]] = []
    for start, length in sorted(runs):
        if found and start <= sum(found[-1]):
            first, before = found.pop()
            start, length = first, max(before, start + length - first)
        found.append((start, length))
    return found


def _take_away(start: int, nbytes: int) -> None:
    if hasattr(mmap, "MADV_DONTNEED"):
        _LIBRARY.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)


def give_pages_back(memory: torch.Tensor) -> None:
    """Give the whole pages of a run of this process's own memory (uint8, see `own_memory`) back to the system; it reads
    as zeros afterwards."""
    start, stop = whole_pages(memory.data_ptr(), memory.numel())
    if stop > start:
        _take_away(start, stop - start)

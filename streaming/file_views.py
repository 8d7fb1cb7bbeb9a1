"""A run of a file used where it lies in the system's page cache: a map for as long as a product needs it.

Copying out of the cache takes a core as long as multiplying takes it (5 GB/s a core measured, against 45 for setting up
the pages of a map), and the bytes are in memory twice. The price is that of every map, see streaming.kept_maps.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import torch

from quant.dtypes import to_torch
from quant.scheme import StoredSpec
from streaming.device import view_of, whole_pages
from streaming.kept_maps import private_map
from streaming.page_cache import is_cached

MADV_POPULATE_READ = 22  # Linux 5.14: all pages at once; elsewhere they come one by one, as they are touched
_EINVAL = 22
_LIBRARY = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class FileView:
    """`memory`: uint8 [nbytes], the file's own bytes, until the last tensor of it goes. `check` raises when the file is
    not what it was: to be called right before the bytes are used."""

    memory: torch.Tensor
    check: Callable[[], None]

    def as_stored(self, spec: StoredSpec) -> torch.Tensor:
        """The stored tensor that the bytes are."""
        return view_of(self.memory, 0, spec)

    def as_rows(self, spec: StoredSpec) -> torch.Tensor:
        """The rows of a stored tensor [O, I] that the bytes are."""
        return self.memory.view(to_torch(spec.dtype)).view(-1, *spec.shape[1:])


def view_cached(
    descriptor: int, offset: int, nbytes: int, *, before: Callable[[], None] = lambda: None
) -> torch.Tensor | None:
    """uint8 [nbytes], a map of a file from `offset` on; None where the page cache has not all of it, or it cannot be
    mapped. `before` is called right before there are pages of it: to give others back, so that both count once."""
    if nbytes == 0 or not is_cached(descriptor, offset, nbytes):
        return None
    before()
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        memory = private_map(descriptor, offset + nbytes - start, offset=start)
    except (OSError, ValueError):  # what the map would not take, a read says in its own words
        return None
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[offset - start :] if _populate(whole) else None


def _populate(memory: torch.Tensor) -> bool:
    """Set up the pages of a map; False where its file has none behind some of them, or they cannot be read."""
    address, nbytes = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel())
    return _LIBRARY.madvise(address, nbytes, MADV_POPULATE_READ) == 0 or ctypes.get_errno() == _EINVAL


def give_pages_back(memory: torch.Tensor) -> None:
    """Give the whole pages of a run of this process's own memory (uint8, see `own_memory`) back to the system; it reads
    as zeros afterwards."""
    start, stop = whole_pages(memory.data_ptr(), memory.numel())
    if stop > start and hasattr(mmap, "MADV_DONTNEED"):
        _LIBRARY.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)

"""Matmuls cut into panels: fixed runs of output rows, each computed by one thread.

How a library divides a product among threads decides the order of its sums, so its bits depend on the number of
threads (measured: MKL's float32 and oneDNN's bfloat16 products do, from 4 rows on). Here the division depends on the
weight's shape alone (quant.panel_bounds) and every panel is computed with torch's own threads set to one; whoever runs
the panels may take them in any order and on any number of threads, and the bits stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch


class Workspace:
    """Buffers that one thread uses again and again: fresh memory costs more to touch than to fill."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized contiguous tensor; valid until the next one of the same name and dtype is taken."""
        count = 1
        for size in shape:
            count *= size
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[name, dtype] = torch.empty(count, dtype=dtype)
        return buffer[:count].view(shape)


Panel = Callable[[Workspace], None]
RunPanels = Callable[[Sequence[Panel]], None]


class InOrder:
    """Runs panels one after the other in the calling thread."""

    def __init__(self) -> None:
        self._workspace = Workspace()

    def __call__(self, panels: Sequence[Panel]) -> None:
        """Run them with one thread of torch's own."""
        with one_thread():
            for panel in panels:
                panel(self._workspace)


@contextmanager
def one_thread() -> Iterator[None]:
    """torch's own threads set to one for the block, in the calling thread (half a microsecond a change)."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

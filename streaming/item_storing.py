"""From an item's bytes to what is stored of it, whoever loads it: the pipeline, or experts on demand."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from streaming.arrivals import Arrivals
from streaming.cut_storing import CutArrivals, Maximum, store_part
from streaming.device import Device
from streaming.errors import LayerLoadError, StreamClosedError, StreamingError
from streaming.load_plan import LoadItem
from streaming.residency import Residency
from streaming.stages import is_quantized, needs_host, place_of_rows, slice_item, store_item
from streaming.trace import Tracer


def wide_numbers(
    item: LoadItem, raw: torch.Tensor, device: Device, stored: Mapping[str, torch.Tensor] | None = None
) -> torch.Tensor:
    """The item's numbers on the device, from its bytes on the host; written to their place at once where they are
    decoded on the CPU and stay as they are. `stored`: of its parameter, where that is not the device's own."""
    on_host = device.torch_device.type == "cpu"
    own = device.stored[item.param.name] if stored is None else stored
    place = place_of_rows(item, own) if on_host else None
    if needs_host(item):
        return device.bring(slice_item(item, raw, place))
    return slice_item(item, device.bring(raw), place)


class ItemStoring:
    """Puts items' numbers into their parameters' stored tensors, and holds those that wait for others of their weight.
    Items of a weight come in plan order. `maximum`: over the ranks that share it."""

    def __init__(self, maximum: Maximum) -> None:
        self._maximum = maximum
        self._arrivals, self._cut_arrivals = Arrivals(), CutArrivals()

    def store(self, item: LoadItem, wide: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> None:
        """`stored`: the stored tensors of the item's parameter."""
        if item.held:
            self._cut_arrivals.store(item, wide, stored)
        elif item.param.is_cut_within and is_quantized(item):
            store_part(item, wide, stored, maximum=self._maximum)
        elif item.leaf and not item.param.kept_as_stored:
            self._arrivals.store(item, wide, stored)
        else:
            store_item(item, wide, stored)


@contextmanager
def at_stage(
    item: LoadItem, stage: str, *, residency: Residency, tracer: Tracer, args: dict[str, int]
) -> Iterator[None]:
    """Around an item's work in a stage, in whatever thread: what a waiting forward is told, a span of the trace with
    `args`, and the stage's name on whatever fails."""
    residency.mark(item.layer, stage)
    begin_s = time.monotonic()
    try:
        yield
    except (LayerLoadError, StreamClosedError):
        raise
    except Exception as error:
        raise item_failure(item, stage, error) from error
    tracer.add(stage, item.tensor.name, start_s=begin_s, end_s=time.monotonic(), layer=item.layer, args=args)


def item_failure(item: LoadItem, stage: str, error: Exception) -> LayerLoadError:
    """What went wrong with an item, with layer, stage and tensor."""
    ours = isinstance(error, (StreamingError, MemoryError))
    return LayerLoadError(item.layer, stage, item.tensor.name, error if ours else f"{type(error).__name__}: {error}")

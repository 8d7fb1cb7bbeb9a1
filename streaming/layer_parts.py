"""One layer's parts on all ranks that share it, loaded at once by one process: a thread for each rank.

The scales that reach over the cuts are agreed between the threads, as ranks that are processes agree over a process
group: every rank enters for its items in plan order, and waits for the others.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import torch

from streaming.hooks import Hooks
from streaming.one_layer import load_one_layer
from streaming.prepare import Prepared

Tensors = dict[str, torch.Tensor]
"""A layer's stored tensors by their full names."""


class MaximaEndedError(Exception):
    """Another rank's part has failed, so nothing is agreed any more."""


class Maxima:
    """Where the threads of `size` ranks agree on maxima."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._given: list[torch.Tensor] = [torch.empty(0)] * size

    def of(self, x: torch.Tensor, *, rank: int) -> torch.Tensor:
        """The elementwise maximum of what all ranks give; they enter in the same order. Raises MaximaEndedError."""
        if self._barrier.parties == 1:
            return x
        self._given[rank] = x.cpu()  # of a device: other threads work on streams of their own
        self._meet()
        found = torch.stack(self._given).amax(0).to(x.device)
        self._meet()  # until all have looked, nobody gives the next one
        return found

    def _meet(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise MaximaEndedError from None

    def end(self) -> None:
        """Whoever waits, or comes, gets MaximaEndedError."""
        self._barrier.abort()


def load_parts(ranks: Sequence[Prepared], layer: str, *, hooks: Hooks) -> list[Tensors]:
    """What each of the ranks keeps of a layer; `ranks`: all that are cut apart by tensor parallelism, in their order.

    Raises the error of the rank that failed first, such as LayerLoadError.
    """
    maxima = Maxima(len(ranks))
    if len(ranks) == 1:
        return [load_part(ranks[0], layer, maxima=maxima, rank=0, hooks=hooks)]
    found: list[Tensors] = [{} for _ in ranks]
    errors: list[BaseException] = []

    def load(rank: int) -> None:
        told = hooks if rank == 0 else Hooks(warn=hooks.warn)
        try:
            found[rank] = load_part(ranks[rank], layer, maxima=maxima, rank=rank, hooks=told)
        except BaseException as error:
            errors.append(error)
            maxima.end()

    threads = [
        threading.Thread(target=load, args=(rank,), name=f"firstlayer-rank-{rank}") for rank in range(len(ranks))
    ]
    _join_all(threads, maxima)
    if errors:
        raise _cause(errors)
    return found


def load_part(prepared: Prepared, layer: str, *, maxima: Maxima, rank: int, hooks: Hooks) -> Tensors:
    """What one rank keeps; nothing where it has nothing of the layer."""
    if not any(one.name == layer and one.items for one in prepared.plan.layers):
        return {}
    return load_one_layer(prepared, layer, hooks=hooks, maximum=partial(maxima.of, rank=rank))


def _join_all(threads: Sequence[threading.Thread], maxima: Maxima) -> None:
    """Run them to their end, also when this thread is interrupted: then soon."""
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        for thread in threads:
            thread.join()
    except BaseException:
        maxima.end()
        for thread in started:
            thread.join()
        raise


def _cause(errors: Sequence[BaseException]) -> BaseException:
    """The first that is not about the others' end."""
    return next((error for error in errors if not _is_end(error)), errors[0])


def _is_end(error: BaseException | None) -> bool:
    return error is not None and (isinstance(error, MaximaEndedError) or _is_end(error.__cause__))

"""Small items taken together: one hand-over to a worker thread for what has landed, and not one for each expert."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
from anyio.abc import ObjectReceiveStream
from anyio.streams.memory import MemoryObjectReceiveStream

from streaming.load_plan import LoadItem

BATCH_NBYTES = 8 << 20  # of items that are taken together; a larger one goes alone


async def batches(receive: ObjectReceiveStream[LoadItem]) -> AsyncIterator[tuple[LoadItem, ...]]:
    """The items in order: each with those behind it that are there already, of the same layer, while they are small and
    need no memory of their own on their way (views of the window, or in their place).

    What ranks share goes alone: an item must reach the next stage before this one waits for a rank, which may itself
    wait for that item's maxima there (see streaming.stages.share). Batches end where bytes happen to have landed, so
    they are not the same on all ranks.
    """
    following: LoadItem | None = None
    while True:
        if following is None:
            try:
                following = await receive.receive()
            except anyio.EndOfStream:
                return
        batch, nbytes = [following], following.nbytes
        following = None
        while _goes_along(batch[0]) and (found := _next(receive)) is not None:
            nbytes += found.nbytes
            if found.layer != batch[0].layer or nbytes > BATCH_NBYTES or not _goes_along(found):
                following = found
                break
            batch.append(found)
        yield tuple(batch)


def _goes_along(item: LoadItem) -> bool:
    return item.tensor.is_plain and item.shared is None and not item.picked


def _next(receive: ObjectReceiveStream[LoadItem]) -> LoadItem | None:
    """The next item if it is there."""
    assert isinstance(receive, MemoryObjectReceiveStream)
    try:
        found: LoadItem = receive.receive_nowait()
    except (anyio.WouldBlock, anyio.EndOfStream):
        return None
    return found

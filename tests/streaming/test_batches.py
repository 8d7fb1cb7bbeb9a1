"""Small items that have landed are taken together: of one layer, up to a limit, what needs no memory of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import anyio

from examples.write_tiny_model import TinyModel
from streaming.batches import BATCH_NBYTES, batches
from streaming.load_plan import LoadItem, SharedRead
from tests.streaming.planned import plan_of

MODEL = TinyModel(layers=2, files=1)


def taken(*waves: Sequence[LoadItem]) -> list[tuple[int, ...]]:
    """The batches of items that land in waves, by the items' numbers; the next wave lands when nothing is left."""

    async def run() -> list[tuple[int, ...]]:
        send, receive = anyio.create_memory_object_stream[LoadItem](100)
        found = []
        following = iter(waves)

        def land() -> None:
            wave = next(following, None)
            if wave is None:
                send.close()
            for item in wave or ():
                send.send_nowait(item)

        land()
        async with receive:
            async for batch in batches(receive):
                found.append(tuple(item.index for item in batch))
                if not receive.statistics().current_buffer_used:
                    land()
        return found

    return anyio.run(run)


def test_what_has_landed_of_a_layer_is_one_batch_and_layers_do_not_mix() -> None:
    items = plan_of(MODEL).items
    first = [item for item in items if item.layer == "layers.0"]
    second = [item for item in items if item.layer == "layers.1"]
    numbers = [tuple(item.index for item in layer) for layer in (first, second)]
    assert taken([*first, *second]) == numbers
    assert taken(first[:2], first[2:]) == [numbers[0][:2], numbers[0][2:]]  # nobody waits for what has not landed


def test_a_batch_ends_before_the_limit_and_a_large_item_goes_alone() -> None:
    item = plan_of(MODEL).items[0]
    row = item.tensor.row_nbytes
    sizes = [BATCH_NBYTES // 4 // row] * 5 + [2 * BATCH_NBYTES // row, 1]
    items = [replace(item, index=index, rows=(0, rows)) for index, rows in enumerate(sizes)]
    assert taken(items) == [(0, 1, 2, 3), (4,), (5,), (6,)]


def test_what_is_decoded_goes_alone() -> None:
    item = plan_of(MODEL).items[0]
    turned = replace(item.tensor, big_endian=True)
    items = [
        replace(item, index=0),
        replace(item, index=1, tensor=turned),
        replace(item, index=2),
        replace(item, index=3),
    ]
    assert taken(items) == [(0,), (1,), (2, 3)]


def test_what_ranks_share_goes_alone_at_its_owner_too() -> None:
    """In a batch its maxima would wait for the items behind it, and those for a rank that waits for the maxima."""
    item = plan_of(MODEL).items[0]
    shared = SharedRead(owner=0, ranks=(0, 1), rank=0)
    items = [
        replace(item, index=0),
        replace(item, index=1, shared=shared),
        replace(item, index=2, shared=shared),
        replace(item, index=3),
        replace(item, index=4),
    ]
    assert taken(items) == [(0,), (1,), (2,), (3, 4)]

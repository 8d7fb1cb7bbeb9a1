"""The layout of both regions: no item overwrites one that is in use, none waits for itself or a later one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.write_tiny_model import TinyModel
from quant.dtypes import DType
from streaming.errors import BudgetError
from streaming.read_plan import ALIGNMENT, PIECE_NBYTES, Region, plan_reads, ring_slots
from tests.streaming.planned import FILE, Blocks, plan_of, tensors_of

MIB = 1 << 20
sizes_and_capacity = st.lists(st.integers(1, 1000), max_size=60).flatmap(
    lambda sizes: st.tuples(st.just(sizes), st.integers(max(sizes, default=1), 3000))
)


@settings(max_examples=300, deadline=None)
@given(sizes_and_capacity)
def test_an_item_overlaps_none_that_may_still_be_in_use(case: tuple[list[int], int]) -> None:
    """Items are released in order: once `released` are, all from that number on may still be there."""
    sizes, capacity = case
    slots = ring_slots(sizes, capacity=capacity)
    for index, (start, released) in enumerate(slots):
        for other in range(released, index):
            begin, end = slots[other][0], slots[other][0] + sizes[other]
            assert start + sizes[index] <= begin or end <= start, f"{index} at {start} overwrites {other} at {begin}"


@settings(max_examples=300, deadline=None)
@given(sizes_and_capacity)
def test_no_item_waits_for_itself_or_a_later_one(case: tuple[list[int], int]) -> None:
    """By walking it: items are read as soon as they may be, and released in order once they are read."""
    sizes, capacity = case
    slots = ring_slots(sizes, capacity=capacity)
    read = released = 0
    while released < len(sizes):
        while read < len(sizes) and slots[read][1] <= released:
            read += 1
        assert read > released, f"item {read} waits for {slots[read][1]} releases, {released} are possible"
        released += 1


@settings(max_examples=300, deadline=None)
@given(sizes_and_capacity)
def test_items_lie_inside_the_window_at_aligned_places(case: tuple[list[int], int]) -> None:
    sizes, capacity = case
    slots = ring_slots(sizes, capacity=capacity)
    assert len(slots) == len(sizes)
    assert all(
        start % ALIGNMENT == 0 and start + size <= capacity for (start, _), size in zip(slots, sizes, strict=True)
    )
    assert all(
        a <= b for (_, a), (_, b) in pairwise(slots)
    )  # an item that may be read does not overtake one that may not


@pytest.mark.parametrize(
    ("sizes", "capacity", "expected"),
    [
        ([], 100, []),
        ([64, 64, 64], 192, [(0, 0), (64, 0), (128, 0)]),
        ([64, 64, 64], 128, [(0, 0), (64, 0), (0, 1)]),
        ([100, 100, 100], 100, [(0, 0), (0, 1), (0, 2)]),
        ([1, 1, 1, 1], 65, [(0, 0), (64, 0), (0, 1), (64, 2)]),
        ([64, 64, 128, 64], 192, [(0, 0), (64, 0), (0, 2), (128, 2)]),
    ],
)
def test_slots_by_hand(sizes: list[int], capacity: int, expected: list[tuple[int, int]]) -> None:
    assert ring_slots(sizes, capacity=capacity) == expected


# --- pieces ---------------------------------------------------------------------------------------------------------

WIDE = TinyModel(
    layers=2, hidden_size=2048, heads=16, kv_heads=4, head_dim=128, intermediate_size=5000, vocab_size=9000
)


@pytest.mark.parametrize("staged", [True, False])
def test_pieces_cover_each_item_exactly_and_come_in_plan_order(staged: bool) -> None:
    plan = plan_of(WIDE, direct=not staged)
    reads = plan_reads(plan, window_nbytes=100 * MIB)
    assert [piece.item for piece in reads.pieces] == sorted(piece.item for piece in reads.pieces)
    assert max(piece.nbytes for piece in reads.pieces) == PIECE_NBYTES == 8 * MIB
    for item in plan.items:
        pieces = [piece for piece in reads.pieces if piece.item == item.index]
        place = item.file_offset
        for piece in pieces:
            assert (piece.file_offset, piece.dest - pieces[0].dest) == (place, place - item.file_offset)
            assert piece.region is (Region.WINDOW if staged else Region.FINAL)
            place += piece.nbytes
        assert place == item.file_offset + item.nbytes
        assert reads.files[pieces[0].file] == item.tensor.file == FILE


def test_direct_items_never_wait_and_fill_their_parameters_end_to_end() -> None:
    plan = plan_of(TinyModel(layers=1))
    reads = plan_reads(plan, window_nbytes=64)
    assert {piece.released for piece in reads.pieces} == {0}
    assert reads.window_nbytes == 0
    dests = {piece.item: piece.dest for piece in reads.pieces}
    qkv = [dests[item.index] for item in plan.items if "qkv_proj" in item.param.name]
    base = reads.final_offsets["model.layers.0.self_attn.qkv_proj.weight", "weight"]
    assert qkv == [base, base + 64 * 128, base + 96 * 128]  # q, k, v: 64, 32 and 32 rows of 128 bytes
    assert all(offset % 64 == 0 for offset in reads.final_offsets.values())


@pytest.mark.parametrize("hidden", [64, 36])
def test_final_memory_holds_every_parameter_once(hidden: int) -> None:
    """36 values make rows of 72 bytes and norms that end between two aligned addresses."""
    model = TinyModel(layers=2, hidden_size=hidden, heads=3, kv_heads=1, head_dim=12, intermediate_size=50)
    plan = plan_of(model)
    reads = plan_reads(plan, window_nbytes=64)
    nbytes = {param.name: param.nbytes for layer in plan.layers for param in layer.spec.params}
    ends = sorted((offset, offset + nbytes[name]) for (name, _), offset in reads.final_offsets.items())
    assert len(ends) == len(nbytes)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(ends))
    assert ends[-1][1] <= reads.final_nbytes


def test_quantized_parameters_have_no_place_in_final_memory() -> None:
    plan = plan_of(TinyModel(layers=1), scheme=Blocks())
    reads = plan_reads(plan, window_nbytes=1 * MIB)
    assert not any("_proj" in name for name, _ in reads.final_offsets)
    assert reads.window_offsets.keys() == {item.index for item in plan.items if "_proj" in item.param.name}


def test_several_files_are_numbered_in_the_order_of_first_use() -> None:
    tensors = tensors_of(TinyModel(layers=1))
    other = FILE.with_name("other.safetensors")
    tensors["lm_head.weight"] = replace(tensors["lm_head.weight"], file=other)
    reads = plan_reads(plan_of(TinyModel(layers=1), tensors), window_nbytes=64)
    assert reads.files == (FILE, other)
    assert {piece.file for piece in reads.pieces} == {0, 1}


def test_a_parameter_in_two_dtypes_on_disk_is_direct_in_parts_only() -> None:
    """q in float16 among bfloat16: its bytes must be converted, k's and v's lie in final memory beside its place."""
    tensors = tensors_of(TinyModel(layers=1))
    q = "model.layers.0.self_attn.q_proj.weight"
    tensors[q] = replace(tensors[q], dtype=DType.F16)
    plan = plan_of(TinyModel(layers=1), tensors)
    reads = plan_reads(plan, window_nbytes=1 * MIB)
    base = reads.final_offsets["model.layers.0.self_attn.qkv_proj.weight", "weight"]
    regions = {item.tensor.name.split(".")[-2]: (piece.region, piece.dest)
               for item in plan.items for piece in reads.pieces
               if piece.item == item.index and "qkv_proj" in item.param.name}  # fmt: skip
    assert regions == {
        "q_proj": (Region.WINDOW, 0),
        "k_proj": (Region.FINAL, base + 64 * 128),
        "v_proj": (Region.FINAL, base + 96 * 128),
    }


def test_a_window_smaller_than_the_largest_item_is_refused_with_both_numbers() -> None:
    plan = plan_of(WIDE, direct=False)
    largest = 32 * MIB  # a run of rows of the table or the head, which take 36,864,000 bytes
    with pytest.raises(BudgetError) as caught:
        plan_reads(plan, window_nbytes=1_000_000)
    assert str(caught.value) == (
        "the window of 1,000,000 bytes is smaller than the largest weight that passes through it "
        f"({largest:,} bytes): ask for --window 32MiB or more"
    )
    assert plan_reads(plan, window_nbytes=largest).window_nbytes == largest


def test_the_window_is_no_larger_than_what_passes_through_it() -> None:
    plan = plan_of(TinyModel(layers=1), direct=False)
    reads = plan_reads(plan, window_nbytes=1 << 40)
    assert plan.read_nbytes <= reads.window_nbytes < plan.read_nbytes + 64 * len(plan.items)

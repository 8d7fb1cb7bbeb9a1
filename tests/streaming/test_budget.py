"""The memory a load needs, by hand, and the refusal that holds every number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from examples.write_tiny_model import TinyModel
from quant.dtypes import DType
from quant.int4 import IntPerGroup
from quant.int8 import Int8PerChannel
from quant.scheme import Scheme
from quant.wide import Wide
from streaming.budget import (
    DEFAULT_WINDOW_NBYTES,
    Budget,
    choose_window,
    convert_nbytes,
    copies_nbytes,
    make_budget,
    passing_nbytes,
)
from streaming.checkpoint.tensors import Encoding
from streaming.errors import BudgetError
from streaming.plan import LoadPlan
from tests.streaming.planned import Blocks, plan_of, tensors_of

MODEL = TinyModel(layers=1)
KEPT = 61696 + 20608 + 20480  # see test_plan's golden table


def test_a_plan_that_is_read_straight_to_its_place_needs_no_window() -> None:
    budget = make_budget(plan_of(MODEL), window_nbytes=None, cache_nbytes=1000)
    assert budget == Budget(kept_nbytes=KEPT, window_nbytes=0, convert_nbytes=0, cache_nbytes=1000)
    assert budget.peak_nbytes == KEPT + 1000


def test_the_window_counts_what_passes_through_it_at_most() -> None:
    plan = plan_of(MODEL, direct=False)
    assert make_budget(plan, window_nbytes=None, cache_nbytes=0).window_nbytes == KEPT
    assert make_budget(plan, window_nbytes=30_000, cache_nbytes=0).window_nbytes == 30_000


def test_the_default_window_is_128_mib_or_two_of_the_largest_items() -> None:
    assert choose_window(plan_of(MODEL, direct=False)) == DEFAULT_WINDOW_NBYTES == 128 << 20
    wide = TinyModel(layers=1, hidden_size=8192, heads=64, kv_heads=8, head_dim=128, intermediate_size=8192)
    whole = plan_of(wide, direct=False, scheme=Blocks(0))  # a scale for all rows: 8192 x 8192 x 2 bytes in one item
    assert choose_window(whole) == 2 * 8192 * 8192 * 2


def with_blocks(scheme: Scheme) -> LoadPlan:
    """The q projection is stored in blocks of 32 numbers in 34 bytes."""
    tensors, name = tensors_of(MODEL), "model.layers.0.self_attn.q_proj.weight"
    encoding = Encoding("Q8_0", 32, 34)
    tensors[name] = replace(tensors[name], dtype=DType.F32, nbytes=64 * 68, encoding=encoding)
    return plan_of(MODEL, tensors, scheme=scheme)


def test_two_wide_copies_are_counted_where_bytes_must_be_decoded_before_they_are_quantized() -> None:
    assert convert_nbytes(with_blocks(Blocks())) == 2 * 64 * 64 * 4
    assert convert_nbytes(with_blocks(Wide())) == 0  # decoded straight to their place
    assert convert_nbytes(plan_of(MODEL, scheme=Blocks())) == 0  # quantized straight out of the window


def with_strides(**changes: Any) -> LoadPlan:
    """The q projection [64, 64] is stored as the transpose of what it is."""
    tensors, name = tensors_of(MODEL), "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = replace(tensors[name], strides=(1, 64), **changes)
    return plan_of(MODEL, tensors)


def test_a_copy_is_counted_where_a_tensor_that_is_read_whole_must_be_turned_round() -> None:
    assert convert_nbytes(with_strides()) == 0  # copied to its place number by number
    assert convert_nbytes(with_strides(big_endian=True)) == 64 * 64 * 2
    assert convert_nbytes(with_strides(big_endian=True, rope_heads=4)) == 64 * 64 * 2


def test_a_table_that_rows_are_picked_of_is_counted_twice() -> None:
    """Its rows are no runs of bytes: the prompt's are taken from the whole of it, its bytes and its numbers."""
    tensors, name = tensors_of(MODEL), "model.embed_tokens.weight"
    tensors[name] = replace(tensors[name], strides=(1, 160), dtype=DType.F32, nbytes=160 * 64 * 4)
    assert convert_nbytes(plan_of(MODEL, tensors)) == 2 * 160 * 64 * 4


def test_a_limit_that_is_too_small_is_refused_with_every_part() -> None:
    plan = plan_of(MODEL, direct=False)
    with pytest.raises(BudgetError) as caught:
        make_budget(plan, window_nbytes=51_200, cache_nbytes=10_240, limit_nbytes=102_400)
    assert str(caught.value) == (
        "--memory 100.0 KiB is too small: 160.4 KiB are needed (100.4 KiB of weights, 50.0 KiB of window, 0 B for "
        "conversion, 10.0 KiB of KV cache); try --quantization, a smaller --window or a smaller --max-model-len"
    )


def test_a_limit_that_is_just_enough_is_kept() -> None:
    plan = plan_of(MODEL)
    assert make_budget(plan, window_nbytes=None, cache_nbytes=5, limit_nbytes=KEPT + 5).limit_nbytes == KEPT + 5
    with pytest.raises(BudgetError, match="too small"):
        make_budget(plan, window_nbytes=None, cache_nbytes=5, limit_nbytes=KEPT + 4)


def test_a_layer_passes_a_device_as_two_items_each_as_it_was_read_and_wide() -> None:
    layer, head, table = plan_of(MODEL, direct=False).layers
    assert passing_nbytes(layer) == 2 * (96 * 64 * 2 + 96 * 64 * 4)  # gate, up or down
    assert passing_nbytes(table) == passing_nbytes(head) == 2 * (160 * 64 * 2 + 160 * 64 * 4)


def test_packed_copies_are_those_that_the_device_has() -> None:
    """On a GPU int4 alone, in eights of rows and in runs of 128 inputs: of these all projections but o and down."""
    model = TinyModel(layers=2, hidden_size=128, heads=4, head_dim=24, intermediate_size=88)
    rows = (4 + 2 + 2) * 24 + 2 * 88
    layer = rows * 128 // 2 + rows * (128 // 32) * 4
    assert copies_nbytes(plan_of(model, scheme=IntPerGroup()), device="cuda") == 2 * layer + 2 * layer
    assert copies_nbytes(plan_of(model, scheme=Int8PerChannel()), device="cuda") == 0
    fast = make_budget(
        plan_of(model, scheme=IntPerGroup()), window_nbytes=None, cache_nbytes=0, packs=True, device="cuda:1"
    )
    assert fast.packed_nbytes == 4 * layer

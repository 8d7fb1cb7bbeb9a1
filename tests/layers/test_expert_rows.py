"""All experts at once: rows in the order of their experts, torch's grouped product, and the sum for each token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from layers.expert_rows import (
    GROUPED_NBYTES,
    by_expert,
    fits_groups,
    grouped_product,
    is_grouped,
    rows_at_once,
    weighed,
)
from layers.moe import Experts, SparseMLP
from layers.topology import Topology
from quant.kernels import KernelMode, Kernels
from tests.layers.family_cases import FAMILY_CASES
from tests.layers.thread_groups import rank_model, whole_stored
from tests.layers.tiny import config_of, context, random_weights, wide_specs


def test_rows_come_to_their_experts_in_order() -> None:
    order = by_expert(torch.tensor([3, 0, 3, 1, 0]), count=5)
    assert order.order.tolist() == [1, 4, 3, 0, 2]
    assert order.experts.tolist() == [0, 0, 1, 3, 3]
    assert order.stops.tolist() == [2, 3, 3, 5, 5]
    assert order.stops.dtype is torch.int32


def test_without_rows_every_expert_ends_at_none() -> None:
    assert by_expert(torch.empty(0, dtype=torch.int64), count=3).stops.tolist() == [0, 0, 0]


def test_an_expert_without_rows_takes_no_part_in_the_grouped_product() -> None:
    weight, rows = torch.arange(48.0).view(12, 4), torch.eye(4)[[0, 3, 1]]
    found = grouped_product(rows, weight, torch.arange(12.0), order=by_expert(torch.tensor([0, 2, 2]), count=3))
    by_hand = [weight[0:4, 0] + torch.arange(4.0), *(weight[8:12, at] + torch.arange(8.0, 12.0) for at in (3, 1))]
    assert found.tolist() == torch.stack(by_hand).tolist()


def test_results_are_added_in_the_order_of_their_experts() -> None:
    # In bfloat16 256 + 1 = 256, so that 1 + 1 + 256 and 256 + 1 + 1 differ.
    results = torch.tensor([[[256.0], [1.0], [1.0]]], dtype=torch.bfloat16)
    ones = torch.ones(1, 3)
    assert weighed(results, ones, torch.tensor([[0, 1, 2]])).item() == 256
    assert weighed(results, ones, torch.tensor([[7, 1, 2]])).item() == 258


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_all_experts_at_once_give_what_they_give_one_by_one(name: str) -> None:
    experts, width = sparse_experts(name)
    x, weights = torch.randn(6, width), torch.rand(6, 2)
    chosen = torch.tensor([[0, 3], [3, 1], [3, 0], [2, 3], [4, 1], [0, 1]])
    with torch.inference_mode():
        torch.testing.assert_close(experts.grouped(x, weights, chosen), experts(x, weights, chosen, context()))


def test_many_rows_go_through_the_experts_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, width = sparse_experts("qwen3_moe")
    x, weights, chosen = torch.randn(5, width), torch.rand(5, 2), torch.randint(7, (5, 2))
    with torch.inference_mode():
        wanted = experts(x, weights, chosen, context())
        monkeypatch.setattr("layers.expert_rows.GROUPED_NBYTES", 4 * 64 * 4)  # four rows of gate and up
        torch.testing.assert_close(experts.grouped(x, weights, chosen), wanted)


def test_the_rows_at_once_are_bounded_by_their_bytes() -> None:
    assert rows_at_once(7168, itemsize=2) == GROUPED_NBYTES // 14336
    assert rows_at_once(GROUPED_NBYTES, itemsize=2) == 1


def test_on_a_cpu_experts_go_one_by_one() -> None:
    assert not is_grouped(torch.empty(1, 64, dtype=torch.bfloat16), (64,), dtype=torch.bfloat16, kernels=Kernels())
    exact = replace(Kernels(), mode=KernelMode.EXACT)
    assert not is_grouped(torch.empty(1, 64, dtype=torch.bfloat16), (64,), dtype=torch.bfloat16, kernels=exact)


def test_the_grouped_product_takes_bfloat16_rows_of_whole_strides() -> None:
    assert fits_groups((64, 24), torch.bfloat16, torch.bfloat16)
    assert not fits_groups((64, 20), torch.bfloat16, torch.bfloat16)
    assert not fits_groups((64, 24), torch.float32, torch.float32)


def sparse_experts(name: str) -> tuple[Experts, int]:
    """The experts of a tiny model's last layer, filled, and their input's width."""
    model_type, changes = FAMILY_CASES[name]
    config = config_of(model_type, **changes)
    specs = wide_specs(config)
    model = rank_model(config, specs, whole_stored(specs, random_weights(config)), Topology())
    mlp = model.layers[-1].mlp
    assert isinstance(mlp, SparseMLP)
    return mlp.experts, config.hidden_size

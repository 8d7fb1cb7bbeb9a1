"""Routers with groups: the bias decides who is chosen and not with what weight; groups limit the choice."""

from __future__ import annotations

import torch

from layers.grouped_router import GroupedRouter, within_best_groups
from layers.model_config import GroupedChoice, MoEConfig
from layers.weights import ParamKind, ParamSpec, Section
from quant.dtypes import DType
from quant.wide import Wide
from tests.layers.tiny import context

INFINITE = float("inf")


def spec(name: str, *shape: int) -> ParamSpec:
    return ParamSpec(name, shape, (Section("", shape[0]),), ParamKind.ROUTER, DType.F32, Wide())


def route(
    logits: list[float], choice: GroupedChoice, *, top_k: int, bias: list[float] | None, renormalize: bool
) -> dict[int, float]:
    """One token whose logits these are."""
    config = MoEConfig(len(logits), top_k, 8, (True,), renormalize, grouped=choice)
    named = None if bias is None else spec("gate.e_score_correction_bias", len(logits))
    router = GroupedRouter(spec("gate.weight", len(logits), 1), named, config, choice)
    router.register_parameter("weight", torch.nn.Parameter(torch.tensor(logits)[:, None], requires_grad=False))
    if bias is not None:
        given = torch.nn.Parameter(torch.tensor(bias), requires_grad=False)
        router.register_parameter("e_score_correction_bias", given)
    weights, chosen = router(torch.ones(1, 1, dtype=torch.bfloat16), context())
    assert weights.dtype == torch.float32
    return dict(zip(chosen[0].tolist(), weights[0].tolist(), strict=True))


def test_a_bias_finer_than_bfloat16_decides_the_choice_and_no_weight() -> None:
    choice = GroupedChoice(sigmoid=True, correction_bias=True, scale=2.0)
    near = [0.0, 0.0, -3.0, -3.0]  # the first two are equal, but for the bias
    for first, bias in ((0, [1.0001, 1.0, 0.0, 0.0]), (1, [1.0, 1.0001, 0.0, 0.0])):
        assert route(near, choice, top_k=1, bias=bias, renormalize=False) == {first: 1.0}  # 2 * sigmoid(0)
    raised = route(near, choice, top_k=1, bias=[0.0, 0.0, 0.0, 9.0], renormalize=False)
    torch.testing.assert_close(raised, {3: 2.0 * torch.sigmoid(torch.tensor(-3.0)).item()})


def test_weights_that_add_up_to_one_are_scaled_afterwards() -> None:
    choice = GroupedChoice(sigmoid=False, scale=2.5)
    found = route([1.0, 2.0, 3.0, 0.0], choice, top_k=2, bias=None, renormalize=True)
    assert set(found) == {1, 2}
    assert abs(sum(found.values()) - 2.5) < 1e-6
    assert abs(found[2] / found[1] - torch.tensor(1.0).exp().item()) < 1e-5


def test_groups_are_ranked_by_their_best_experts() -> None:
    ranked = torch.tensor([[0.9, 0.0, 0.6, 0.5, 0.1, 0.2]])
    by_one = within_best_groups(ranked, GroupedChoice(sigmoid=False, groups=3, top_groups=1, summed=1))
    by_two = within_best_groups(ranked, GroupedChoice(sigmoid=True, groups=3, top_groups=1, summed=2))
    two = within_best_groups(ranked, GroupedChoice(sigmoid=True, groups=3, top_groups=2, summed=2))
    assert torch.equal(by_one, torch.tensor([[0.9, 0.0, *[-INFINITE] * 4]]))
    assert torch.equal(by_two, torch.tensor([[*[-INFINITE] * 2, 0.6, 0.5, *[-INFINITE] * 2]]))
    assert torch.equal(two, torch.tensor([[0.9, 0.0, 0.6, 0.5, *[-INFINITE] * 2]]))


def test_scores_below_zero_lose_to_none_that_is_left_out() -> None:
    """A bias may make them so; an expert outside the best groups is never chosen."""
    choice = GroupedChoice(sigmoid=True, groups=2, top_groups=1, summed=2, correction_bias=True)
    bias = [-2.0, -2.0, -5.0, 0.5]
    assert set(route([0.0, 0.0, 0.0, 0.0], choice, top_k=2, bias=bias, renormalize=False)) == {0, 1}

"""Choosing tokens: the order of the filters, repeatability by seed, frequencies, and what the options refuse."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from layers.errors import LogitsError
from layers.sampler import Sampler, draw, keep_min_p, keep_top_k, keep_top_p, penalize_repetition
from layers.sampling_params import SamplingParams

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
PROBS = [0.6364, 0.2341, 0.0861, 0.0317, 0.0117]  # softmax of the above


def kept(scores: torch.Tensor) -> list[int]:
    return scores.isfinite().nonzero()[:, 0].tolist()


def drawn(params: SamplingParams, *, count: int = 1, previous: tuple[int, ...] = ()) -> list[int]:
    sampler = Sampler(params)
    return [sampler(LOGITS, previous=previous) for _ in range(count)]


def test_temperature_zero_takes_the_likeliest() -> None:
    assert drawn(SamplingParams(), count=5) == [0] * 5
    assert Sampler(SamplingParams())(torch.tensor([0.0, 3.0, 3.0]).bfloat16(), previous=[]) == 1


def test_the_penalty_counts_for_greedy_too() -> None:
    assert drawn(SamplingParams(repetition_penalty=3.0), previous=(0, 0)) == [1]
    scores = penalize_repetition(LOGITS, (0, 0, 4), penalty=2.0)
    assert scores.tolist() == [1.0, 1.0, 0.0, -1.0, -4.0]
    assert LOGITS.tolist() == [2.0, 1.0, 0.0, -1.0, -2.0]


@pytest.mark.parametrize(("top_k", "wanted"), [(1, [0]), (2, [0, 1]), (0, [0, 1, 2, 3, 4]), (9, [0, 1, 2, 3, 4])])
def test_top_k(top_k: int, wanted: list[int]) -> None:
    assert kept(keep_top_k(LOGITS, top_k=top_k)) == wanted


def test_top_k_keeps_what_is_equal_to_the_last() -> None:
    assert kept(keep_top_k(torch.tensor([1.0, 2.0, 1.0, 0.0]), top_k=2)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("top_p", "wanted"), [(0.1, [0]), (0.63, [0]), (0.64, [0, 1]), (0.9, [0, 1, 2]), (1.0, [*range(5)])]
)
def test_top_p_keeps_the_token_that_reaches_it(top_p: float, wanted: list[int]) -> None:
    assert kept(keep_top_p(LOGITS, top_p=top_p)) == wanted


@pytest.mark.parametrize(
    ("min_p", "wanted"), [(1.0, [0]), (0.36, [0, 1]), (0.37, [0]), (0.04, [0, 1, 2, 3]), (0.0, [*range(5)])]
)
def test_min_p_is_relative_to_the_likeliest(min_p: float, wanted: list[int]) -> None:
    assert kept(keep_min_p(LOGITS, min_p=min_p)) == wanted


def test_temperature_comes_before_top_p() -> None:
    # At temperature 4 the likeliest has 0.36 and the next 0.28: two are needed for 0.5, where one was enough.
    assert set(drawn(SamplingParams(temperature=4.0, top_p=0.5, seed=1), count=200)) == {0, 1}
    assert set(drawn(SamplingParams(temperature=1.0, top_p=0.5, seed=1), count=200)) == {0}


def test_filters_apply_one_after_the_other() -> None:
    # Of the two that top_k leaves, the likeliest has 0.73: top_p = 0.7 keeps it alone; of all five it has 0.64.
    assert set(drawn(SamplingParams(temperature=1.0, top_p=0.7, seed=1), count=200)) == {0, 1}
    assert set(drawn(SamplingParams(temperature=1.0, top_k=2, top_p=0.7, seed=1), count=200)) == {0}


def test_tokens_come_as_often_as_they_are_likely() -> None:
    found = Counter(drawn(SamplingParams(temperature=1.0, seed=7), count=20_000))
    for token, probability in enumerate(PROBS):  # within five standard deviations
        assert abs(found[token] / 20_000 - probability) < 5 * (probability * (1 - probability) / 20_000) ** 0.5


@pytest.mark.parametrize("temperature", [0, 1.0, 5e-324])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error(value: float, temperature: float) -> None:
    with pytest.raises(LogitsError, match=f"hold {value}.*float16.*try bfloat16"):
        Sampler(SamplingParams(temperature=temperature))(torch.tensor([1.0, value, 2.0]), previous=[])
    with pytest.raises(LogitsError, match="hold -inf"):
        Sampler(SamplingParams(temperature=temperature))(torch.full((3,), -torch.inf), previous=[])


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-3])
def test_a_temperature_near_zero_is_nearly_greedy(temperature: float) -> None:
    assert drawn(SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1, seed=3), count=50) == [0] * 50


def test_a_seed_repeats_the_draws_whatever_else_is_drawn() -> None:
    params = SamplingParams(temperature=1.5, seed=11)
    first = drawn(params, count=50)
    torch.rand(10)
    other = Sampler(SamplingParams(temperature=1.5, seed=12))
    sampler, again = Sampler(params), []
    for _ in range(50):
        again.append(sampler(LOGITS, previous=[]))
        other(LOGITS, previous=[])
    assert again == first
    assert drawn(SamplingParams(temperature=1.5, seed=12), count=50) != first
    assert len({tuple(drawn(SamplingParams(temperature=5.0), count=40)) for _ in range(3)}) > 1


@pytest.mark.parametrize("probs", [[0.0, 0.0, 1.0, 0.0], [0.0, 0.5, 0.0, 0.5, 0.0, 0.0]])
def test_what_has_no_probability_is_never_drawn(probs: list[float]) -> None:
    generator = torch.Generator().manual_seed(0)
    found = {draw(torch.tensor(probs), generator=generator) for _ in range(300)}
    assert found == {index for index, probability in enumerate(probs) if probability}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -0.1}, r"temperature is -0.1: it must be a number of at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"top_k": float("inf")}, "top_k is inf"),
        ({"temperature": "1"}, "temperature is '1'"),
        ({"top_k": -1}, r"top_k is -1: it must be an integer of at least 0"),
        ({"top_k": 1.5}, "top_k is 1.5: it must be an integer"),
        ({"top_k": True}, "top_k is True"),
        ({"top_p": 0.0}, r"top_p is 0.0: it must be a number greater than 0 and at most 1"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"min_p": 1.5}, r"min_p is 1.5: it must be a number of at least 0 and at most 1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0: it must be a number greater than 0"),
        ({"seed": -1}, r"seed is -1: it must be an integer of at least 0 and at most 9223372036854775807"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"max_tokens": 0}, "max_tokens is 0: it must be an integer of at least 1"),
        ({"stop": "end"}, "stop is 'end': it must be a tuple of texts"),
        ({"stop": ("",)}, r"stop is \('',\)"),
        ({"ignore_eos": 1}, "ignore_eos is 1: it must be True or False"),
    ],
)
def test_options_out_of_range_are_named_with_their_range(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(**options)


def test_the_ends_of_the_ranges_are_allowed() -> None:
    params = SamplingParams(
        temperature=0, top_k=0, top_p=1, min_p=1, repetition_penalty=1, seed=2**63 - 1, max_tokens=1
    )
    assert params.is_greedy
    assert Sampler(SamplingParams(temperature=1.0, seed=2**63 - 1))(LOGITS, previous=[]) in range(5)
    assert not SamplingParams(temperature=1e-3).is_greedy

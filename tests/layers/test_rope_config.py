"""Rotary settings: where each value is found, what old and new files call it, and what is refused."""

from __future__ import annotations

from math import log, sqrt
from typing import Any

import pytest

from layers.config import parse_config
from layers.errors import ModelConfigError
from layers.model_config import RopeKind
from tests.layers.real_configs import CONFIGS
from tests.layers.tiny import config_of, rope_of


def test_rotary_settings_of_real_models() -> None:
    ropes = {name: rope_of(parse_config(raw)) for name, raw in CONFIGS.items()}
    assert (ropes["Llama-2-7b"].kind, ropes["Llama-2-7b"].theta, ropes["Llama-2-7b"].dim) == (
        RopeKind.DEFAULT, 10000.0, 128,
    )  # fmt: skip
    assert ropes["SmolLM2-135M"].theta == 100000.0
    llama3 = ropes["Llama-3.2-1B"]
    assert (llama3.kind, llama3.theta, llama3.factor) == (RopeKind.LLAMA3, 500000.0, 32.0)
    assert (llama3.low_freq_factor, llama3.high_freq_factor, llama3.original_max_position_embeddings) == (1, 4, 8192)
    assert ropes["Phi-3-mini-4k"].kind is RopeKind.DEFAULT
    yarn = ropes["DeepSeek-V3"]
    assert (yarn.kind, yarn.dim, yarn.factor, yarn.attention_factor) == (RopeKind.YARN, 64, 40.0, 1.0)
    assert yarn.interleaved
    long = ropes["Phi-3-mini-128k"]
    assert (long.kind, long.dim, long.factor, len(long.short_factor)) == (RopeKind.LONGROPE, 96, 32.0, 48)
    assert long.attention_factor == pytest.approx(sqrt(1 + log(32) / log(4096)))
    mini = ropes["Phi-4-mini"]
    assert (mini.dim, mini.partial_rotary_factor, mini.original_max_position_embeddings) == (96, 0.75, 4096)


@pytest.mark.parametrize(
    ("keys", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, 7e4),
        ({"rope_parameters": {"rope_theta": 7e4}, "rope_theta": 5e5}, 7e4),
        ({"rope_parameters": None, "rope_scaling": None}, 1e4),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 7e4}}, 7e4),
    ],
)
def test_where_theta_is_found(keys: dict[str, Any], theta: float) -> None:
    assert rope_of(config_of(**keys)).theta == theta


def test_rope_type_comes_before_type_and_old_names_are_known() -> None:
    both = {"type": "mrope", "rope_type": "linear", "factor": 2.0}
    assert rope_of(config_of(rope_scaling=both)).kind is RopeKind.LINEAR
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    assert rope_of(config_of("phi3", rope_scaling={"type": "su", **factors})).kind is RopeKind.LONGROPE
    assert rope_of(config_of("phi3", rope_scaling={"type": "yarn", **factors})).kind is RopeKind.LONGROPE


def test_the_trained_length_beside_the_settings_comes_before_the_one_inside() -> None:
    settings = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert rope_of(config_of(rope_parameters=settings)).original_max_position_embeddings == 64
    beside = config_of(rope_parameters=settings, original_max_position_embeddings=32)
    assert rope_of(beside).original_max_position_embeddings == 32
    without = config_of(rope_parameters={"rope_type": "yarn", "factor": 4.0})
    assert rope_of(without).original_max_position_embeddings == 128


def test_yarn_takes_a_missing_factor_from_the_lengths() -> None:
    rope = rope_of(config_of(rope_parameters={"rope_type": "yarn", "original_max_position_embeddings": 32}))
    assert rope.factor == 4.0
    assert rope.attention_factor == pytest.approx(0.1 * log(4.0) + 1.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rope_type": "ntk"}, ["rope_parameters: rope_type 'ntk'", "default, linear, dynamic, llama3"]),
        ({"rope_type": 3}, ["rope_type", "a string"]),
        ({"rope_type": "linear"}, ["factor is missing"]),
        ({"rope_type": "linear", "factor": "2"}, ["factor", "'2'"]),
        ({"rope_type": "dynamic", "factor": -1.0}, ["factor", "-1.0"]),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
         ["high_freq_factor (4)", "low_freq_factor (4)"]),
        ({"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}, ["factor is missing"]),
        ({"rope_type": "longrope", "long_factor": [1.0] * 6}, ["short_factor is missing"]),
        ({"rope_type": "longrope", "long_factor": [1.0] * 5, "short_factor": [1.0] * 6},
         ["long_factor has 5 numbers, 6 are needed"]),
        ({"rope_type": "longrope", "long_factor": [1.0] * 6, "short_factor": [1.0] * 5 + [0]}, ["short_factor"]),
        ({"rope_type": "default", "rope_theta": 1.0}, ["rope_theta", "greater than 1"]),
        ({"rope_type": "default", "partial_rotary_factor": 1.5}, ["partial_rotary_factor must be at most 1, not 1.5"]),
        ({"rope_type": "default", "partial_rotary_factor": 0.01}, ["partial_rotary_factor 0.01 rotates 0 dims"]),
        ({"full_attention": {"rope_type": "default"}}, ["full_attention", "not supported"]),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": "no"}, ["truncate", "'no'"]),
    ],
)  # fmt: skip
def test_impossible_rotary_settings_are_named(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelConfigError) as error:
        config_of(rope_parameters=settings)
    for word in words:
        assert word in str(error.value)


def test_two_settings_that_disagree_are_an_error() -> None:
    with pytest.raises(ModelConfigError, match=r"rope_scaling has factor = 2, but rope_parameters has factor = 4"):
        config_of(
            rope_scaling={"rope_type": "linear", "factor": 2}, rope_parameters={"rope_type": "linear", "factor": 4}
        )

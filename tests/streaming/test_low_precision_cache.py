"""A KV cache in few bits, and activations in 8: streamed equals resident, and 4-bit weights with 8-bit activations
and a 4-bit cache against a simulation in numpy, number by number."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.write_tiny_model import TinyModel
from layers.kv_cache import cache_room_nbytes, kv_cache_nbytes
from layers.kv_forms import CACHE_DTYPES
from streaming import LLM, LoadOptions, OptionError, SamplingParams
from streaming.commands.verify import compare
from streaming.prepare import prepare

Array = np.ndarray[Any, Any]
IDS = [5, 9, 7, 3, 150, 2, 8, 77, 4, 100, 1]


@pytest.mark.parametrize("activations", ["auto", "int8"])
@pytest.mark.parametrize("name", CACHE_DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_streamed_equals_resident(
    family: str, name: str, activations: str, tiny_folder: Callable[[TinyModel], Path]
) -> None:
    """While loading and once loaded, with sliding windows and capped scores too."""
    folder = tiny_folder(TinyModel(family=family, layers=2))
    options = LoadOptions(quantization="int8_per_channel", kv_cache_dtype=name, activation_dtype=activations)
    report = compare(prepare(str(folder), options), IDS, argparse.Namespace(json=True, quiet=True))
    assert report.differences == []
    assert report.logits == 2 * len(IDS) * 160


@pytest.mark.parametrize("name", CACHE_DTYPES)
def test_several_prompts_at_once_answer_as_each_alone(name: str, four_layers: Path) -> None:
    with LLM(four_layers, kv_cache_dtype=name, dtype="float32") as llm:
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        together = [answer.token_ids for answer in llm.complete([IDS, IDS[:3]], params)]
        alone = [answer.token_ids for ids in (IDS, IDS[:3]) for answer in llm.complete([ids], params)]
    assert together == alone


def test_the_budget_counts_the_cache_as_it_is_kept(four_layers: Path) -> None:
    budgets = {
        name: prepare(str(four_layers), LoadOptions(kv_cache_dtype=name, max_model_len=100)).budget.cache_nbytes
        for name in CACHE_DTYPES
    }
    rows = 2 * 4 * 2 * 100  # keys and values, layers, heads, tokens of 16 numbers
    numbers = 2 * 2 * 100 * 16  # of one layer: so many are made wide at a time, keys and then values in strips
    kept = {"fp8": rows * 16, "fp8_e4m3": rows * 16, "int8": rows * 20, "int4": rows * (8 + 4)}
    strips = {"fp8": 6, "fp8_e4m3": 6, "int8": 4, "int4": 2 * 4 + 2}  # a number, in float32 and int16; groups of 32
    assert budgets == {
        "auto": rows * 32,
        **{name: nbytes + 2 * numbers + strips[name] * numbers // 2 for name, nbytes in kept.items()},
    }


def test_memory_admits_a_longer_context_where_the_cache_is_small(tiny_folder: Callable[[TinyModel], Path]) -> None:
    folder = tiny_folder(TinyModel(layers=12))  # one layer is made wide at a time
    wide = prepare(str(folder), LoadOptions(max_model_len=500))
    limit = wide.budget.peak_nbytes - 1
    assert prepare(str(folder), LoadOptions(max_model_len=500, memory=limit)).plan.stream is not None
    assert prepare(str(folder), LoadOptions(max_model_len=500, memory=limit, kv_cache_dtype="int8")).plan.stream is None
    with LLM(folder, max_model_len=500, memory=limit, kv_cache_dtype="int8") as llm:
        assert llm.logits(IDS).shape == (len(IDS), 160)
        how: Any = {"max_tokens": len(IDS), "dtype": wide.dtype, "cache_dtype": "int8"}
        expected = kv_cache_nbytes(wide.config, **how) + cache_room_nbytes(wide.config, **how)
        assert llm.stats().peak_budget_bytes == wide.budget.peak_nbytes - wide.budget.cache_nbytes + expected


def test_unknown_words_and_what_does_not_go_together_are_refused() -> None:
    with pytest.raises(OptionError, match="--kv-cache-dtype 'fp4' is not known: choose one of auto, fp8, fp8_e4m3"):
        LoadOptions(kv_cache_dtype="fp4")
    with pytest.raises(OptionError, match="--activation-dtype 'fp8' is not known: choose one of auto, int8"):
        LoadOptions(activation_dtype="fp8")
    with pytest.raises(OptionError, match="--activation-dtype int8 does not go with --kernels fast"):
        LoadOptions(activation_dtype="int8", kernels="fast")


# --- W4A8KV4 --------------------------------------------------------------------------------------------------------


def test_4_bit_weights_8_bit_activations_and_a_4_bit_cache(tiny_folder: Callable[[TinyModel], Path]) -> None:
    folder = tiny_folder(TinyModel(layers=2, head_dim=40, dtype="float32"))
    options = {"quantization": "int4_per_group", "activation_dtype": "int8", "kv_cache_dtype": "int4"}
    with LLM(folder, **options) as llm:  # type: ignore[arg-type]
        found = llm.logits(IDS).double().numpy()
        answer = llm.complete([IDS], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids
        params = {name: param.detach() for name, param in llm.shell.named_parameters()}
    weights = {name.removesuffix(".weight"): wide_of(name, params) for name in params if name.endswith(".weight")}
    wanted = simulated(IDS, weights)
    assert np.abs(found - wanted).max() <= 1e-3 * np.abs(wanted).max()
    ids = list(IDS)
    for token in answer:  # decoding reads what the earlier steps have kept
        assert token == simulated(ids, weights)[-1].argmax()
        ids.append(token)
    with LLM(folder, quantization="int4_per_group") as llm:
        assert np.abs(llm.logits(IDS).double().numpy() - wanted).max() > 1e-2 * np.abs(wanted).max()


def wide_of(name: str, params: dict[str, torch.Tensor]) -> Array:
    """A stored weight's numbers: 4-bit codes, the even column in the low half, minus 8, times its group's scale."""
    stored = params[name]
    if stored.dtype != torch.uint8:
        return stored.double().numpy()
    codes = np.stack((stored.numpy() & 15, stored.numpy() >> 4), axis=-1).reshape(len(stored), -1)
    scale = np.repeat(params[f"{name}_scale"].double().numpy(), 32, axis=1)[:, : codes.shape[1]]
    numbers: Array = (codes.astype(np.float64) - 8) * scale
    return numbers


def simulated(ids: list[int], weights: dict[str, Array]) -> Array:
    """Logits of a llama of 4 query heads, 2 key and value heads of 40 numbers, in float64."""
    x = weights["model.embed_tokens"][ids]
    for layer in range(2):
        at = f"model.layers.{layer}"
        qkv = linear(norm(x, weights[f"{at}.input_layernorm"]), weights[f"{at}.self_attn.qkv_proj"])
        q, k, v = (part.reshape(len(ids), -1, 40) for part in np.split(qkv, [160, 240], axis=1))
        q, k, v = rotated(q), in_4_bits(rotated(k)), in_4_bits(v)
        mixed = np.stack([attended(q[:, head], k[:, head // 2], v[:, head // 2]) for head in range(4)], axis=1)
        x = x + linear(mixed.reshape(len(ids), -1), weights[f"{at}.self_attn.o_proj"])
        inner = linear(norm(x, weights[f"{at}.post_attention_layernorm"]), weights[f"{at}.mlp.gate_up_proj"])
        gate, up = np.split(inner, 2, axis=1)
        x = x + linear(gate / (1 + np.exp(-gate)) * up, weights[f"{at}.mlp.down_proj"])
    return norm(x, weights["model.norm"]) @ weights["lm_head"].T  # type: ignore[no-any-return]


def linear(x: Array, weight: Array) -> Array:
    """Every token in whole numbers from -127 to 127 times its own scale."""
    step = np.abs(x).max(axis=1, keepdims=True) / 127
    return (np.rint(x / step) * step) @ weight.T  # type: ignore[no-any-return]


def norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * weight  # type: ignore[no-any-return]


def rotated(x: Array) -> Array:
    angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(20) / 20)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    left, right = x[..., :20], x[..., 20:]
    return np.concatenate((left * cos - right * sin, right * cos + left * sin), axis=-1)


def in_4_bits(x: Array) -> Array:
    """Groups of 32 and of the last 8 numbers, each with its scale and minimum."""
    parts = []
    for group in (x[..., :32], x[..., 32:]):
        low, high = group.min(axis=-1, keepdims=True), group.max(axis=-1, keepdims=True)
        step = (high - low) / 15
        parts.append(np.rint((group - low) / step) * step + low)
    return np.concatenate(parts, axis=-1)


def attended(q: Array, k: Array, v: Array) -> Array:
    scores = q @ k.T / np.sqrt(40)
    scores[np.triu_indices(len(q), 1)] = -np.inf
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    return shares / shares.sum(axis=1, keepdims=True) @ v  # type: ignore[no-any-return]

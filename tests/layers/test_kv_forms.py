"""A KV cache in few bits: what is kept, against the definitions of its forms, and attention that reads it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import layers.kv_cache
from layers.attention import attend
from layers.kv_cache import KVCache, cache_room_nbytes, kv_cache_nbytes
from layers.kv_codec import Room
from layers.kv_forms import CACHE_DTYPES
from layers.model_config import ModelConfig
from quant.dtypes import DType
from tests.layers.tiny import config_of, run, some_ids, tiny_model

LOW = [name for name in CACHE_DTYPES if name != "auto"]
Array = np.ndarray[Any, Any]


def cache_config(head_dim: int = 64, heads: int = 2, layers: int = 2) -> ModelConfig:
    return config_of(
        "phi3", head_dim=head_dim, partial_rotary_factor=0.5, num_key_value_heads=heads, num_hidden_layers=layers
    )


def appended(cache: KVCache, keys: torch.Tensor, values: torch.Tensor, *, layer: int = 0) -> KVCache:
    cache.append(layer, keys, values)
    cache.advance(keys.shape[1])
    return cache


def kept(cache: KVCache, *, layer: int = 0, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """All heads' keys and values, copied out of the runs."""
    runs = [(k.clone(), v.clone()) for _, k, v in cache.runs(layer, start=start, stop=cache.length)]
    return torch.cat([k for k, _ in runs]), torch.cat([v for _, v in runs])


def nearest(numbers: Array, grid: Array) -> Array:
    """The number of an ascending grid nearest to each number."""
    above = np.clip(np.searchsorted(grid, numbers), 1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    found: Array = np.where(numbers - low < high - numbers, low, high)
    return found


def e4m3_grid() -> Array:
    """Every finite number of e4m3, from its definition: sign, 4 exponent bits of bias 7, 3 mantissa bits."""
    found = {mantissa / 8 * 2.0**-6 for mantissa in range(8)}
    found |= {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)}
    return np.array(sorted(found | {-number for number in found}))


def reference(name: str, x: Array, *, scale: float = 1.0) -> Array:
    """The numbers that a form keeps of x [heads, tokens, d] in float64, one head and token at a time."""
    out = np.empty_like(x)
    for place in np.ndindex(x.shape[:2]):
        row = x[place]
        if name.startswith("fp8"):
            out[place] = nearest(np.clip(row / scale, -448, 448), e4m3_grid()) * scale
        elif name == "int8":
            step = np.abs(row).max() / 127
            out[place] = np.rint(row / step) * step
        else:
            for first in range(0, len(row), 32):
                group = row[first : first + 32]
                step = (group.max() - group.min()) / 15
                out[place][first : first + 32] = np.rint((group - group.min()) / step) * step + group.min()
    return out


@pytest.mark.parametrize("head_dim", [7, 12, 32, 64, 80])
@pytest.mark.parametrize("name", LOW)
def test_what_is_kept_is_what_the_form_says(name: str, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    keys, values = torch.randn(2, 2, 5, head_dim, generator=generator) * 3 + 1
    scales = [(0.5, 0.037), (1.0, 1.0)] if name.startswith("fp8") else None
    cache = KVCache(cache_config(head_dim), max_tokens=6, dtype=DType.F32, cache_dtype=name, scales=scales)
    found = kept(appended(cache, keys, values))
    for numbers, back, scale in zip((keys, values), found, (0.5, 0.037), strict=True):
        wanted = reference(name, numbers.double().numpy(), scale=scale)
        wrong = np.abs(back.double().numpy() - wanted) > 1e-5 * np.abs(wanted) + 1e-6
        assert wrong.mean() <= 0.002  # a number halfway between two, told apart by float32's rounding


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F16])
@pytest.mark.parametrize("name", CACHE_DTYPES)
def test_its_bytes_are_codes_and_scales_and_known_beforehand(name: str, dtype: DType) -> None:
    config, wide = cache_config(80), dtype.itemsize
    rows = 2 * 2 * 2 * 33  # keys and values, layers, heads, tokens
    row = {"auto": 80 * wide, "int8": 80 + 4, "int4": 40 + 3 * 2 * wide}.get(name, 80)
    assert kv_cache_nbytes(config, max_tokens=33, dtype=dtype, cache_dtype=name) == rows * row
    assert KVCache(config, max_tokens=33, dtype=dtype, cache_dtype=name).nbytes == rows * row


@pytest.mark.parametrize("run_nbytes", [1 << 10, 10_000, 16 << 20], ids=["one head", "some heads", "all"])
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("head_dim", [64, 80, 9])
@pytest.mark.parametrize("name", LOW)
def test_the_buffers_that_it_is_decoded_into_are_known_beforehand(
    name: str, head_dim: int, dtype: DType, run_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers.kv_cache, "RUN_NBYTES", run_nbytes)
    monkeypatch.setattr(layers.kv_cache, "STRIP_NUMBERS", 1000)
    config, room = cache_config(head_dim, heads=4), Room(torch.device("cpu"))
    cache = KVCache(config, max_tokens=40, dtype=dtype, cache_dtype=name, room=room)
    for _ in range(40):
        numbers = torch.randn(4, 1, head_dim)
        kept(appended(cache, numbers, numbers))
    held = sum(buffer.nbytes for buffer in room.workspace._buffers.values())
    expected = cache_room_nbytes(config, max_tokens=40, dtype=dtype, cache_dtype=name)
    assert 0.6 * expected <= held <= expected
    assert cache_room_nbytes(config, max_tokens=40, dtype=dtype) == 0


@pytest.mark.parametrize(
    ("name", "least"), [("fp8", 31.0), ("fp8_e4m3", 31.0), ("int8", 43.0), ("int4", 21.7), ("auto", 200.0)]
)
def test_how_much_noise_a_form_makes(name: str, least: float) -> None:
    """Of N(0, 1), in decibels; as SPEC 9 bounds weights of the same bits."""
    keys, values = torch.randn(2, 2, 500, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    cache = KVCache(cache_config(128), max_tokens=500, dtype=DType.BF16, cache_dtype=name)
    for numbers, back in zip((keys, values), kept(appended(cache, keys, values)), strict=True):
        noise = (back.double() - numbers.double()).square().sum()
        assert 10 * torch.log10(numbers.double().square().sum() / noise.clamp(min=1e-30)) >= least


def representable(name: str, *, tokens: int, head_dim: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that the form keeps exactly, in bfloat16 too."""
    generator = torch.Generator().manual_seed(tokens)
    low, high = {"int8": (-127, 128), "int4": (-3, 13)}.get(name, (-15, 16))
    numbers = torch.randint(low, high, (2, 2, tokens, head_dim), generator=generator).float()
    numbers[..., 0::32], numbers[..., 1::32] = low, high - 1  # each group reaches both ends
    return tuple(numbers / 8)  # type: ignore[return-value]


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("run_nbytes", [1, 16 << 20])
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("name", LOW)
def test_attention_over_numbers_that_are_kept_exactly_is_that_of_the_wide_cache_to_the_bit(
    name: str, dtype: DType, run_nbytes: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers.kv_cache, "RUN_NBYTES", run_nbytes)
    monkeypatch.setattr(layers.kv_cache, "STRIP_NUMBERS", 64 * 7)  # strips of seven tokens
    keys, values = representable(name, tokens=40)
    wide = torch.float32 if dtype is DType.F32 else torch.bfloat16
    keys, values = keys.to(wide), values.to(wide)
    caches = [KVCache(cache_config(), max_tokens=41, dtype=dtype, cache_dtype=form) for form in ("auto", name)]
    for count in (1, 3, 40):
        q = torch.randn(8, count, 64, generator=torch.Generator().manual_seed(count)).to(wide)
        found = []
        for cache in caches:
            cache.truncate(0)
            start = 0 if window is None else max(0, 40 - (window + count - 1))
            runs = [heads for heads, _, _ in appended(cache, keys, values).runs(0, stop=40)]
            assert len(runs) == (2 if run_nbytes == 1 and cache.cache_dtype != "auto" else 1)
            parts = [
                attend(q[h.start * 4 : h.stop * 4], k, v, window=window)
                for h, k, v in cache.runs(0, start=start, stop=40)
            ]
            found.append(torch.cat(parts))
        assert torch.equal(*found)


@pytest.mark.parametrize("name", LOW)
def test_a_sequence_that_is_cut_and_taken_up_again_is_as_if_never_cut(name: str) -> None:
    keys, values = torch.randn(2, 2, 9, 64, generator=torch.Generator().manual_seed(3))
    whole, parts = (KVCache(cache_config(), max_tokens=9, dtype=DType.F32, cache_dtype=name) for _ in range(2))
    appended(whole, keys, values)
    appended(parts, keys[:, :4], values[:, :4])
    appended(parts, -keys[:, 4:8], -values[:, 4:8])
    parts.truncate(4)
    appended(parts, keys[:, 4:], values[:, 4:])
    for left, right in zip(kept(whole), kept(parts), strict=True):
        assert torch.equal(left, right)
    assert torch.equal(kept(whole, start=6)[1], kept(whole)[1][:, 6:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", LOW)
def test_what_cannot_be_kept_is_not_hidden(name: str, bad: float) -> None:
    keys, values = torch.randn(2, 2, 3, 64, generator=torch.Generator().manual_seed(3))
    cache = KVCache(cache_config(), max_tokens=6, dtype=DType.F32, cache_dtype=name)
    appended(cache, keys, values)
    before = kept(cache)[0]
    keys[1, 1, 5] = bad
    back = kept(appended(cache, keys, values))[0]
    assert torch.equal(back[:, :3], before)
    found = back[1, 4, 5].item()
    assert found == np.copysign(448, bad) if name.startswith("fp8") and np.isinf(bad) else np.isnan(found)
    assert torch.isfinite(back[0]).all()


@pytest.mark.parametrize("name", LOW)
def test_zeros_stay_zeros_and_equal_numbers_stay_themselves(name: str) -> None:
    keys, values = torch.zeros(2, 3, 64), torch.full((2, 3, 64), 1.5)
    cache = KVCache(cache_config(), max_tokens=3, dtype=DType.BF16, cache_dtype=name)
    found = kept(appended(cache, keys, values))
    assert torch.equal(found[0].float(), keys)
    torch.testing.assert_close(found[1].float(), values, rtol=2**-9, atol=0)


@pytest.mark.parametrize(
    ("name", "scales", "words"),
    [
        ("int8", [(1.0, 1.0)] * 2, "a KV cache of dtype int8 takes no scales; fp8 does"),
        ("fp8", [(1.0, 1.0)], "1 pairs of KV-cache scales were given for 2 layers"),
        ("fp8", [(1.0, 1.0), (0.0, 1.0)], "a KV-cache scale is 0.0: a finite number above 0 is needed"),
        ("fp8", [(1.0, float("nan")), (1.0, 1.0)], "a KV-cache scale is nan"),
        ("fp4", None, "KV cache dtype 'fp4' is not known: choose one of auto, fp8, fp8_e4m3, int8, int4"),
    ],
)
def test_what_a_cache_is_not_made_of(name: str, scales: list[tuple[float, float]] | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        KVCache(cache_config(), max_tokens=3, dtype=DType.F32, cache_dtype=name, scales=scales)


@pytest.mark.parametrize("name", CACHE_DTYPES)
def test_no_number_is_read_by_the_host_on_another_device(name: str) -> None:
    """On the meta device, where whatever asks for a number raises."""
    cache = KVCache(cache_config(80), max_tokens=5, dtype=DType.BF16, device="meta", cache_dtype=name)
    keys, values = torch.empty(2, 2, 5, 80, dtype=torch.bfloat16, device="meta")
    ((_, found, _),) = appended(cache, keys, values).runs(1, stop=5)
    assert (found.shape, found.dtype) == ((2, 5, 80), torch.bfloat16)


# --- in a model


@pytest.mark.parametrize("name", LOW)
def test_a_batch_of_sequences_gives_each_what_it_gets_alone(name: str) -> None:
    model = tiny_model("mistral", sliding_window=5, head_dim=16)
    prompts = [some_ids(11, seed=1), some_ids(3, seed=2)]

    def caches() -> list[KVCache]:
        room = Room(torch.device("cpu"))  # one for both
        return [KVCache(model.config, max_tokens=12, dtype=DType.F32, cache_dtype=name, room=room) for _ in prompts]

    together = run(model, *prompts, caches=caches())
    alone = [run(model, prompt, caches=[cache]) for prompt, cache in zip(prompts, caches(), strict=True)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_prompt_in_steps_sees_the_keys_and_values_of_a_prompt_at_once(family: str, name: str) -> None:
    model = tiny_model(family, head_dim=16)
    ids = some_ids(9, seed=4)
    at_once = KVCache(model.config, max_tokens=9, dtype=DType.F32, cache_dtype=name)
    in_steps = KVCache(model.config, max_tokens=9, dtype=DType.F32, cache_dtype=name)
    whole = run(model, ids, caches=[at_once])
    steps = torch.cat([run(model, part, caches=[in_steps]) for part in (ids[:5], ids[5:6], ids[6:])])
    torch.testing.assert_close(steps, whole, rtol=1e-3, atol=1e-3)
    wide = run(model, ids)
    error = (whole - wide).square().sum() / wide.square().sum()
    assert 0 < error < (0.05 if name == "int4" else 0.005)

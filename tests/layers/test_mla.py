"""Latent attention: both forms are the formula, the right one is taken, and what is kept of a token is its latent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from layers.architecture import layer_specs
from layers.config import parse_config
from layers.errors import ModelConfigError
from layers.kv_cache import KVCache, kv_cache_nbytes
from layers.mla import EXPANDED_NBYTES, LatentAttention, absorbs, per_head
from layers.model_config import GroupedChoice, MLAConfig, ModelConfig
from layers.weights import ParamKind
from quant.dtypes import DType
from quant.float8 import Fp8PerChannel
from quant.kernels import Kernels
from tests.layers.family_cases import FAMILY_CASES, LATENT
from tests.layers.real_configs import CONFIGS
from tests.layers.tiny import OneScheme, config_of, context, fill, random_weights, raw_config, wide_specs

V3 = MLAConfig(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


def latent_config(**changes: Any) -> ModelConfig:
    model_type, usual = FAMILY_CASES["deepseek_v3"]
    return config_of(model_type, **{**usual, **changes})


def attention_of(**changes: Any) -> LatentAttention:
    config = latent_config(first_k_dense_replace=3, **changes)
    found = fill(config, wide_specs(config), random_weights(config)).layers[0].self_attn
    assert isinstance(found, LatentAttention)
    return found


@pytest.mark.parametrize("value_dim", [10, 24])  # below and above a key's 12 + 8
@pytest.mark.parametrize(("count", "length"), [(1, 1), (1, 30), (7, 30), (30, 30)])
def test_both_forms_are_the_formula(value_dim: int, count: int, length: int) -> None:
    attention = attention_of(v_head_dim=value_dim)
    q, kept = torch.randn(4, count, 20), torch.randn(length, 28)
    weight = attention.kv_b_proj.get_parameter("weight").double().view(4, 12 + value_dim, 20)
    latent, turned = kept.double().split([20, 8], dim=1)
    made = torch.einsum("sr,har->hsa", latent, weight)
    keys = torch.cat((made[..., :12], turned.expand(4, -1, -1)), dim=-1)
    scores = q.double() @ keys.transpose(1, 2) * attention.scale
    hidden = torch.ones(count, length, dtype=torch.bool).triu(length - count + 1)
    wanted = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ made[..., 12:]
    with torch.inference_mode():
        for form in (attention._attend_absorbed, attention._attend_expanded):
            torch.testing.assert_close(form(q, kept, context()).double(), wanted, rtol=1e-5, atol=1e-5)


def test_heads_that_are_expanded_one_after_the_other_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = attention_of()
    q, kept = torch.randn(4, 9, 20), torch.randn(9, 28)
    with torch.inference_mode():
        together = attention._attend_expanded(q, kept, context())
        monkeypatch.setattr("layers.mla.EXPANDED_NBYTES", 1)
        apart = attention._attend_expanded(q, kept, context())
        weight, latent = attention.kv_b_proj.get_parameter("weight"), kept[:, :20].contiguous()
        made = F.linear(latent, weight).split(22, dim=1)
        if all(torch.equal(F.linear(latent, rows), one) for rows, one in zip(weight.split(22), made, strict=True)):
            assert torch.equal(apart, together)
        else:  # MKL on AMD: a product of few columns has other last bits than the same columns of one of many
            torch.testing.assert_close(apart, together, rtol=1e-6, atol=1e-6)
    assert EXPANDED_NBYTES > 9 * 4 * (22 + 40) * 4


@pytest.mark.parametrize(
    ("count", "length", "absorbed"),
    [(1, 1, False), (1, 2, True), (1, 100_000, True), (64, 4096, True), (512, 4096, False), (4096, 4096, False)],
)
def test_single_tokens_are_absorbed_and_prompts_are_expanded(count: int, length: int, absorbed: bool) -> None:
    assert absorbs(V3, count=count, length=length) is absorbed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("turned", [False, True])
def test_products_of_each_head_have_the_same_bits_with_any_number_of_threads(dtype: torch.dtype, turned: bool) -> None:
    x, weight = torch.randn(12, 5, 64).to(dtype), torch.randn(12, 64, 96).to(dtype)
    weight = weight.transpose(1, 2).contiguous().transpose(1, 2) if turned else weight
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(per_head(x, weight, Kernels.detect()))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])
    torch.testing.assert_close(found[0].float(), x.float() @ weight.float(), rtol=2e-2, atol=2e-1)


def test_half_precision_without_instructions_is_multiplied_in_float32() -> None:
    x, weight = torch.randn(3, 2, 64).bfloat16(), torch.randn(3, 64, 96).bfloat16()
    assert torch.equal(per_head(x, weight, Kernels()), (x.float() @ weight.float()).bfloat16())


def test_a_cache_keeps_a_latent_and_the_rotated_numbers_of_each_token() -> None:
    config = latent_config()  # 3 layers, 20 + 8 numbers
    assert kv_cache_nbytes(config, max_tokens=33, dtype=DType.BF16) == 3 * 33 * 28 * 2
    cache = KVCache(config, max_tokens=33, dtype=DType.BF16)
    assert cache.nbytes == 3 * 33 * 28 * 2
    parts = [torch.randn(count, 28).bfloat16() for count in (5, 2)]
    for part in parts:
        cache.append_latents(1, part)
        cache.advance(part.shape[0])
    assert torch.equal(cache.latents(1, stop=7), torch.cat(parts))
    with pytest.raises(ValueError, match="the KV cache holds 33 tokens; 7 are filled and 27 more were given"):
        cache.append_latents(0, torch.randn(27, 28))


@pytest.mark.parametrize("form", ["fp8", "fp8_e4m3", "int8", "int4"])
def test_latents_are_kept_wide_only(form: str) -> None:
    with pytest.raises(ValueError, match=f"a KV cache of dtype {form} is not possible for deepseek_v3"):
        KVCache(latent_config(), max_tokens=4, dtype=DType.F32, cache_dtype=form)


def test_what_is_absorbed_stays_wide_when_the_projections_are_quantized() -> None:
    specs = layer_specs(latent_config(), dtype=DType.BF16, policy=OneScheme(Fp8PerChannel()))
    params = {param.name: param for spec in specs for param in spec.params}
    up = params["model.layers.0.self_attn.kv_b_proj.weight"]
    assert (up.kind, up.scheme.name, up.shape) == (ParamKind.ABSORBED, "none", (4 * (12 + 10), 20))
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"):
        assert params[f"model.layers.0.self_attn.{name}.weight"].scheme.name == "fp8_per_channel"


def test_scores_are_stretched_by_mscale_of_all_dims() -> None:
    """DeepSeek-V3's: 192 numbers of a head, factor 40, mscale_all_dim 1."""
    config = parse_config(CONFIGS["DeepSeek-V3"])
    assert config.attention_scale == pytest.approx(0.1352337788608801, rel=1e-9)
    assert config.moe is not None
    assert config.moe.sparse == (False,) * 3 + (True,) * 58
    assert config.moe.grouped == GroupedChoice(True, 8, 4, 2, correction_bias=True, scale=2.5)
    plain = parse_config(raw_config("deepseek_v3"))
    assert plain.attention_scale == pytest.approx(192**-0.5)
    assert plain.mla == V3
    assert replace(V3, q_lora_rank=None) == parse_config(raw_config("deepseek_v3", q_lora_rank=None)).mla


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"qk_rope_head_dim": 7}, r"qk_rope_head_dim \(7\) is odd; rotation works on pairs"),
        ({"n_group": 5}, r"n_routed_experts \(12\) is not a multiple of n_group \(5\)"),
        ({"topk_group": 5}, r"topk_group \(5\) is more than n_group \(4\)"),
        ({"n_group": 12, "topk_group": 12}, "n_group 12 leaves 1 expert in a group; 2 are ranked by"),
        ({"num_experts_per_tok": 7}, r"num_experts_per_tok \(7\) is more than the 6 experts of topk_group groups"),
        ({"num_experts_per_tok": 13}, r"num_experts_per_tok \(13\) is more than n_routed_experts \(12\)"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not known for this model; sigmoid is"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not known for this model; noaux_tc is"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ModelConfigError, match=words):
        latent_config(**changes)


def test_layers_are_sparse_behind_the_first_dense_ones_at_a_frequency() -> None:
    moe = latent_config(first_k_dense_replace=1, moe_layer_freq=2, num_hidden_layers=5).moe
    assert moe is not None
    assert moe.sparse == (False, False, True, False, True)
    none = latent_config(n_shared_experts=None).moe
    assert none is not None
    assert (none.shared_intermediate_size, moe.shared_intermediate_size) == (0, LATENT["moe_intermediate_size"])

"""What a family assumes where a configuration is silent, and the choices that it offers, against transformers."""

from __future__ import annotations

import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from layers.config import parse_config
from layers.errors import ModelConfigError
from layers.model_config import HeadNorm, ModelConfig, NormKind, Residual
from tests.layers.tiny import ARCHITECTURES, config_of

FAMILIES = (
    "cohere", "deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_oss",
    "granite", "mixtral", "olmo2", "olmoe", "phi", "qwen2_moe", "qwen3_moe", "stablelm",
)  # fmt: skip
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")
ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function")


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module("transformers")


def first_of(config: Any, keys: tuple[str, ...]) -> Any:
    return next(getattr(config, key) for key in keys if hasattr(config, key))


def silent(model_type: str, theirs: Any) -> ModelConfig:
    """Our reading of a configuration that holds sizes and nothing else."""
    sizes = {key: getattr(theirs, key) for key in SIZES if hasattr(theirs, key)}
    return parse_config({"architectures": [ARCHITECTURES[model_type]], **sizes})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_those_of_transformers(model_type: str, transformers: ModuleType) -> None:
    theirs = transformers.CONFIG_MAPPING[model_type]()
    ours = silent(model_type, theirs)
    heads = theirs.num_attention_heads
    eos = theirs.eos_token_id if isinstance(theirs.eos_token_id, list) else [theirs.eos_token_id]
    eos = [] if eos == [None] else eos
    assert ours.num_kv_heads == getattr(theirs, "num_key_value_heads", heads)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // heads)
    assert ours.intermediate_size == (getattr(theirs, "intermediate_size", None) or 4 * theirs.hidden_size)
    assert ours.rms_norm_eps == first_of(theirs, EPSILONS)
    assert ours.hidden_act == first_of(theirs, ACTIVATIONS)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.bos_token_id == theirs.bos_token_id
    assert list(ours.eos_token_ids) == eos
    assert ours.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.logit_softcap == getattr(theirs, "final_logit_softcapping", None)
    assert ours.logit_scale == getattr(theirs, "logit_scale", 1.0)
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * theirs.num_hidden_layers
    windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    assert list(ours.sliding_windows) == windows


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - {"gpt2"}))
def test_default_rotations_are_those_of_transformers(model_type: str, transformers: ModuleType) -> None:
    theirs = transformers.CONFIG_MAPPING[model_type]()
    ours = silent(model_type, theirs)
    given = theirs.rope_parameters
    full, local = given.get("full_attention", given), given.get("sliding_attention")
    assert ours.rope is not None
    assert ours.rope.theta == full["rope_theta"]
    assert ours.rope.partial_rotary_factor == full.get("partial_rotary_factor", 1.0)
    assert (ours.local_rope is None) == (local is None)
    if ours.local_rope is not None:
        assert ours.local_rope.theta == local["rope_theta"]


@pytest.mark.parametrize(
    "model_type", ["cohere", "gemma", "gemma2", "glm", "glm4", "granite", "olmo2", "phi", "stablelm"]
)
def test_old_and_new_rotary_settings_mean_the_same(model_type: str) -> None:
    settings = {"rope_type": "linear", "factor": 3.0}
    new = {"rope_parameters": {**settings, "rope_theta": 777.0, "partial_rotary_factor": 0.5}}
    old = {"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_theta": 777.0, "partial_rotary_factor": 0.5}
    assert config_of(model_type, head_dim=16, **old) == config_of(model_type, head_dim=16, **new)
    assert config_of(model_type, head_dim=16, **old) != config_of(model_type, head_dim=16)


def test_the_old_keys_of_gemma3_mean_the_same_as_the_new() -> None:
    old = {"rope_theta": 5e5, "rope_local_base_freq": 70.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
    }
    config = config_of("gemma3_text", head_dim=16, **old)
    assert config == config_of("gemma3_text", head_dim=16, rope_parameters=new)
    assert config.rope is not None
    assert config.local_rope is not None
    assert (config.rope.factor, config.rope.theta) == (8.0, 5e5)
    assert (config.local_rope.factor, config.local_rope.theta) == (1.0, 70.0)


def test_every_sixth_layer_of_gemma3_and_every_second_of_gemma2_sees_everything() -> None:
    assert config_of("gemma3_text", num_hidden_layers=13, sliding_window=9).sliding_windows == (
        (*(9,) * 5, None, *(9,) * 5, None, 9)
    )  # fmt: skip
    assert config_of("gemma2", num_hidden_layers=3, sliding_window=9).sliding_windows == (9, None, 9)
    kinds = ["full_attention", "sliding_attention"]
    assert config_of("gemma2", sliding_window=9, layer_types=kinds).sliding_windows == (None, 9)


def test_the_first_files_of_gemma_call_the_tanh_form_gelu() -> None:
    assert config_of("gemma", hidden_act="gelu").hidden_act == "gelu_pytorch_tanh"
    assert config_of("gemma", hidden_act="gelu", hidden_activation=None).hidden_act == "gelu_pytorch_tanh"
    assert config_of("gemma", hidden_act="gelu", hidden_activation="relu").hidden_act == "relu"


def test_the_switches_of_stablelm() -> None:
    plain = config_of("stablelm")
    assert (plain.qkv_bias, plain.qk_norm, plain.residual) == (False, False, Residual.PRE)
    switched = config_of("stablelm", use_qkv_bias=True, qk_layernorm=True, use_parallel_residual=True)
    assert (switched.qkv_bias, switched.qk_norm, switched.residual) == (True, True, Residual.PARALLEL)
    assert (switched.norm, switched.qk_norm_over, switched.o_bias) == (NormKind.LAYER, HeadNorm.LISTED, False)


@pytest.mark.parametrize(
    ("model_type", "changes", "words"),
    [
        ("gpt2", {"scale_attn_weights": False}, ["scale_attn_weights = false"]),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx = true"]),
        ("gpt2", {"add_cross_attention": True}, ["add_cross_attention = true"]),
        ("gpt2", {"n_embd": 50}, ["hidden_size (50)"]),
        ("gpt2", {"n_embd": "x"}, ["n_embd", "'x' (str)"]),
        ("gpt2", {"activation_function": "mish"}, ["activation_function", "'mish'"]),
        ("phi", {"qk_layernorm": True}, ["qk_layernorm = true"]),
        ("phi", {"tie_word_embeddings": True}, ["tie_word_embeddings = true"]),
        ("gemma3_text", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("gemma2", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("gemma2", {"attn_logit_softcapping": -1.0}, ["attn_logit_softcapping", "-1.0"]),
        ("gemma2", {"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar", "not 0"]),
        ("gemma2", {"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, ["layer_types[0]", "None"]),
        ("gemma3_text", {"sliding_window_pattern": 0}, ["sliding_window_pattern"]),
        ("gemma3_text", {"rope_local_base_freq": 0.5}, ["rope_local_base_freq", "0.5"]),
        ("stablelm", {"layer_norm_eps": 0}, ["layer_norm_eps"]),
        ("granite", {"logits_scaling": 0}, ["logits_scaling"]),
    ],
)
def test_what_is_refused_is_named(model_type: str, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelConfigError) as error:
        config_of(model_type, head_dim=16, **changes)
    assert all(word in str(error.value) for word in ("config.json", *words))

"""Configurations of real models mean what their authors meant; broken ones are refused by key and value."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest

from layers.config import family_of, parse_config
from layers.decoder_config import LARGEST_DEPTH
from layers.errors import ModelConfigError, UnsupportedModelError
from layers.family_names import FAMILY_NAMES, MULTIMODAL_NAMES
from layers.mlp import ACTIVATIONS
from layers.model_config import ACTIVATION_NAMES, RopeKind
from layers.models import FAMILIES
from layers.multimodal import MULTIMODAL_MODELS
from quant.dtypes import DType
from tests.layers.real_configs import CONFIGS
from tests.layers.tiny import ARCHITECTURES, config_of, raw_config

# layers, hidden, intermediate, heads, kv heads, head_dim, vocab, eps, tied, length
SIZES = {
    "DeepSeek-V3": (61, 7168, 18432, 128, 128, 64, 129280, 1e-6, False, 163840),
    "Llama-3.2-1B": (16, 2048, 8192, 32, 8, 64, 128256, 1e-5, True, 131072),
    "Llama-2-7b": (32, 4096, 11008, 32, 32, 128, 32000, 1e-5, False, 4096),
    "SmolLM2-135M": (30, 576, 1536, 9, 3, 64, 49152, 1e-5, True, 8192),
    "Mistral-7B-v0.1": (32, 4096, 14336, 32, 8, 128, 32000, 1e-5, False, 32768),
    "Mistral-7B-v0.3": (32, 4096, 14336, 32, 8, 128, 32768, 1e-5, False, 32768),
    "Qwen2.5-0.5B": (24, 896, 4864, 14, 2, 64, 151936, 1e-6, True, 32768),
    "Qwen3-4B": (36, 2560, 9728, 32, 8, 128, 151936, 1e-6, True, 40960),
    "Phi-3-mini-4k": (32, 3072, 8192, 32, 32, 96, 32064, 1e-5, False, 4096),
    "Phi-3-mini-128k": (32, 3072, 8192, 32, 32, 96, 32064, 1e-5, False, 131072),
    "Phi-4-mini": (32, 3072, 8192, 24, 8, 128, 200064, 1e-5, True, 131072),
    "gpt-oss-20b": (24, 2880, 2880, 64, 8, 64, 201088, 1e-5, False, 131072),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_of_real_models(name: str) -> None:
    config = parse_config(CONFIGS[name])
    found = (
        config.num_layers, config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads,
        config.head_dim, config.vocab_size, config.rms_norm_eps, config.tie_word_embeddings,
        config.max_position_embeddings,
    )  # fmt: skip
    assert found == SIZES[name]
    assert config.dtype is {"Llama-2-7b": DType.F16, "gpt-oss-20b": None}.get(name, DType.BF16)
    assert config.hidden_act == "silu"
    assert config.architecture == CONFIGS[name]["architectures"][0]
    assert (config.q_rows, config.kv_rows) == (found[3] * found[5], found[4] * found[5])


@pytest.mark.parametrize(
    ("name", "biases", "qk_norm"),
    [
        ("Llama-3.2-1B", (False, False, False), False),
        ("Mistral-7B-v0.1", (False, False, False), False),
        ("Qwen2.5-0.5B", (True, False, False), False),
        ("Qwen3-4B", (False, False, False), True),
        ("Phi-4-mini", (False, False, False), False),
        ("gpt-oss-20b", (True, True, False), False),
    ],
)
def test_biases_and_norms_of_real_models(name: str, biases: tuple[bool, ...], qk_norm: bool) -> None:
    config = parse_config(CONFIGS[name])
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases
    assert config.qk_norm is qk_norm


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("Llama-3.2-1B", [None] * 16),
        ("Mistral-7B-v0.1", [4096] * 32),
        ("Mistral-7B-v0.3", [None] * 32),
        ("Qwen2.5-0.5B", [None] * 24),
        ("Phi-3-mini-4k", [2047] * 32),
        ("Phi-4-mini", [262144] * 32),
        ("gpt-oss-20b", [128, None] * 12),
    ],
)
def test_windows_of_real_models(name: str, windows: list[int | None]) -> None:
    assert list(parse_config(CONFIGS[name]).sliding_windows) == windows


@pytest.mark.parametrize(
    ("name", "bos", "eos"),
    [("Llama-3.2-1B", 128000, (128001,)), ("SmolLM2-135M", 0, (0,)), ("Phi-4-mini", 199999, (199999,))],
)
def test_special_tokens_of_real_models(name: str, bos: int, eos: tuple[int, ...]) -> None:
    config = parse_config(CONFIGS[name])
    assert (config.bos_token_id, config.eos_token_ids) == (bos, eos)


def test_special_tokens_may_be_lists_null_or_absent() -> None:
    assert config_of(eos_token_id=[7, 8, 0]).eos_token_ids == (7, 8, 0)
    assert config_of(eos_token_id=None, bos_token_id=None).eos_token_ids == ()
    assert config_of(bos_token_id=None).bos_token_id is None
    assert (config_of().bos_token_id, config_of().eos_token_ids) == (1, (2,))
    assert (config_of("qwen2").bos_token_id, config_of("qwen2").eos_token_ids) == (None, ())


def test_a_window_that_mistral_does_not_mention_is_4096_and_a_null_one_is_none() -> None:
    assert config_of("mistral").sliding_windows == (4096, 4096)
    assert config_of("mistral", sliding_window=None).sliding_windows == (None, None)
    assert config_of("phi3").sliding_windows == (None, None)


def test_qwen_windows_need_the_switch_and_begin_at_max_window_layers() -> None:
    on = {"use_sliding_window": True, "sliding_window": 9}
    assert config_of("qwen2", sliding_window=9, max_window_layers=0).sliding_windows == (None, None)
    assert config_of("qwen2", **on, max_window_layers=1).sliding_windows == (None, 9)
    assert config_of("qwen3", **on, max_window_layers=0).sliding_windows == (9, 9)
    assert config_of("qwen2", **on).sliding_windows == (None, None)  # max_window_layers is 28
    kinds = ["sliding_attention", "full_attention"]
    assert config_of("qwen3", **on, max_window_layers=2, layer_types=kinds).sliding_windows == (9, None)


def test_head_dim_is_derived_but_for_qwen3() -> None:
    assert config_of().head_dim == 12
    assert config_of(head_dim=20).head_dim == 20
    assert config_of(head_dim=None).head_dim == 12
    assert config_of("qwen3").head_dim == 128


def test_missing_key_value_heads_mean_one_per_query_head_but_for_mistral_and_qwen() -> None:
    def without(model_type: str, heads: int) -> dict[str, Any]:
        raw = raw_config(model_type, num_attention_heads=heads, head_dim=4)
        del raw["num_key_value_heads"]
        return raw

    assert parse_config(without("llama", 16)).num_kv_heads == 16
    assert parse_config(without("mistral", 16)).num_kv_heads == 8
    assert parse_config(without("qwen2", 64)).num_kv_heads == 32
    assert config_of("mistral", num_key_value_heads=None).num_kv_heads == 4


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"torch_dtype": "float16"}, DType.F16),
        ({"dtype": "torch.bfloat16"}, DType.BF16),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, DType.F32),
        ({"dtype": None, "torch_dtype": "bfloat16"}, DType.BF16),
        ({"torch_dtype": "auto"}, None),
        ({}, None),
    ],
)
def test_dtype(keys: dict[str, Any], dtype: DType | None) -> None:
    assert config_of(**keys).dtype is dtype


# --- the family


def test_every_family_is_found_by_architecture_and_by_model_type() -> None:
    assert {family.model_type for family in FAMILIES} == set(ARCHITECTURES)
    for family in FAMILIES:
        raw = raw_config(family.model_type)
        by_architecture = parse_config({**raw, "model_type": "something-else"})
        by_type = parse_config({key: value for key, value in raw.items() if key != "architectures"})
        assert by_architecture == by_type == parse_config({**raw, "architectures": None})
        assert family_of(by_type) is family


def test_the_table_of_names_says_what_the_families_say() -> None:
    assert {family.model_type: family.architectures for family in FAMILIES} == FAMILY_NAMES
    assert {whole.model_type for whole in MULTIMODAL_MODELS} == set(MULTIMODAL_NAMES)


def test_architectures_come_before_model_type() -> None:
    raw = raw_config("llama", architectures=["Unknown", "Qwen3ForCausalLM"])
    assert parse_config(raw).model_type == "qwen3"


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
        {"architectures": [], "model_type": ""},
        {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
    ],
)
def test_an_unknown_model_is_refused_with_the_known_ones(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        parse_config({**raw_config(), **changes}, where="m/config.json")
    for known in ("LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "qwen3"):
        assert known in str(error.value)
    assert str(changes["architectures"]) in str(error.value)
    assert str(error.value).startswith("m/config.json")


# --- what cannot be run

OWN_KEYS = {
    "dtype", "layer_types", "rope_parameters", "sliding_window_pattern", "hidden_activation", "attn_logit_softcapping",
    "final_logit_softcapping", "query_pre_attn_scalar", "rope_local_base_freq", "layer_norm_eps", "qk_layernorm",
    "use_parallel_residual", "use_qkv_bias", "use_qk_norm", "logit_scale", "logits_scaling", "embedding_multiplier",
    "residual_multiplier", "attention_multiplier", "use_bidirectional_attention",
}  # fmt: skip


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES.keys() - {"gpt2"}))  # it has no rotary settings
def test_no_value_of_any_key_is_more_than_a_clear_error(model_type: str) -> None:
    """Every key with every kind of JSON value: a configuration, or a ModelConfigError that names the key."""
    values = [None, True, 0, -1, 1, 2, 1.5, 10**400, nan, inf, "", "x", [], [1], ["x"], [None], {}, {"a": 1}]
    inner = ["rope_type", "type", "factor", "rope_theta", "low_freq_factor", "high_freq_factor", "short_factor",
             "long_factor", "attention_factor", "beta_fast", "mscale", "mscale_all_dim", "truncate",
             "original_max_position_embeddings", "partial_rotary_factor"]  # fmt: skip
    outer = sorted({key for raw in CONFIGS.values() for key in raw} | OWN_KEYS)
    full = {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "short_factor": [1.0] * 6, "long_factor": [1.0] * 6}  # fmt: skip
    trials: list[tuple[str, dict[str, Any]]] = []
    usual = {"head_dim": 12, "qk_rope_head_dim": 12, "partial_rotary_factor": 1.0}
    for value in values:
        trials += [(key, {**raw_config(model_type, **usual), key: value}) for key in outer]
        for kind in RopeKind:
            ropes = [(key, {"rope_type": kind.value, **full, key: value}) for key in inner]
            trials += [(key, raw_config(model_type, **usual, rope_parameters=rope)) for key, rope in ropes]
    messages = [(key, refusal(raw)) for key, raw in trials]
    refused = [(key, message) for key, message in messages if message]
    assert len(trials) // 3 < len(refused) < len(trials)
    assert not [
        (key, message)
        for key, message in refused
        if not any(word in message for word in (key, "rotary settings", "num_key_value_heads"))
    ]


def refusal(raw: dict[str, Any]) -> str:
    """What the configuration is refused with; empty when it is not. Other errors pass through."""
    try:
        parse_config(raw)
    except ModelConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, ["num_attention_heads (6)", "num_key_value_heads (4)"]),
        ({"hidden_size": 50}, ["hidden_size (50)", "num_attention_heads (4)", "head_dim"]),
        ({"hidden_size": "4096"}, ["hidden_size", "an integer", "'4096' (str)"]),
        ({"hidden_size": 48.0}, ["hidden_size", "48.0 (float)"]),
        ({"hidden_size": None}, ["hidden_size is null"]),
        ({"vocab_size": 0}, ["vocab_size", "from 1", "not 0"]),
        ({"intermediate_size": -80}, ["intermediate_size", "not -80"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True (bool)"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers", str(LARGEST_DEPTH), str(10**9)]),
        ({"vocab_size": 2**40}, ["vocab_size", str(2**40)]),
        ({"head_dim": [64]}, ["head_dim", "[64] (list)"]),
        ({"head_dim": 13}, ["head_dim 13", "pairs"]),
        ({"rms_norm_eps": "1e-5"}, ["rms_norm_eps", "a number", "'1e-5'"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps", "greater than 0"]),
        ({"rms_norm_eps": nan}, ["rms_norm_eps", "nan"]),
        ({"hidden_act": "swiglu"}, ["hidden_act 'swiglu'", "gelu_new", "silu"]),
        ({"hidden_act": 3}, ["hidden_act", "a string", "not 3"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "true or false", "'yes'"]),
        ({"attention_bias": 1}, ["attention_bias", "true or false", "not 1"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["torch_dtype 'float8_e4m3fn'", "bfloat16"]),
        ({"eos_token_id": [2, "3"]}, ["eos_token_id", "'3'"]),
        ({"eos_token_id": -1}, ["eos_token_id", "from 0", "-1"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures", "a list of strings"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "an object"]),
        ({"max_position_embeddings": 0}, ["max_position_embeddings", "not 0"]),
    ],
)
def test_an_impossible_value_is_named_with_what_is_possible(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelConfigError) as error:
        config_of(**changes)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
def test_a_missing_size_is_named(key: str) -> None:
    raw = raw_config()
    del raw[key]
    with pytest.raises(ModelConfigError, match=f"config.json: {key} is missing"):
        parse_config(raw)


def test_a_configuration_that_is_no_object_is_refused() -> None:
    with pytest.raises(ModelConfigError, match=r"a.json must hold a JSON object, not \[1, 2\]"):
        parse_config([1, 2], where="a.json")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": ["full_attention"]}, ["layer_types has 1", "num_hidden_layers is 2"]),
        ({"layer_types": ["full_attention", "chunked_attention"]}, ["layer_types[1] is 'chunked_attention'"]),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5},
            ["layer_types[1]", "sliding_window: 5", "use_sliding_window: None"],
        ),
        ({"use_sliding_window": True, "sliding_window": 0}, ["sliding_window", "not 0"]),
        ({"max_window_layers": -1}, ["max_window_layers", "-1"]),
    ],
)
def test_windows_that_contradict_themselves_are_named(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelConfigError) as error:
        config_of("qwen2", **changes)
    for word in words:
        assert word in str(error.value)


def test_keys_that_nothing_needs_do_no_harm() -> None:
    extra: dict[str, Any] = {
        "transformers_version": "9.9",
        "auto_map": {"AutoModel": "x"},
        "my_own_key": [1, {"a": None}],
    }
    assert config_of(**extra) == config_of()


def test_every_activation_that_a_configuration_may_name_exists() -> None:
    assert set(ACTIVATIONS) == ACTIVATION_NAMES

"""The parameters of every family, by name and shape; what a checkpoint's names become; what is dropped and why."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest

from layers.architecture import is_optional_bias, is_tied, layer_specs
from layers.config import parse_config, weight_map
from layers.model_config import ModelConfig
from layers.weights import Dropped, LayerSpec, ParamKind, Section, Target
from quant.dtypes import DType
from tests.layers.real_configs import CONFIGS
from tests.layers.row_scales import RowScales
from tests.layers.tiny import OneScheme, config_of, wide_specs


def shapes(specs: tuple[LayerSpec, ...], layer: str) -> dict[str, tuple[int, ...]]:
    (spec,) = (spec for spec in specs if spec.name == layer)
    return {param.name: param.shape for param in spec.params}


def names(specs: tuple[LayerSpec, ...], layer: str) -> list[str]:
    return list(shapes(specs, layer))


def test_layers_come_in_the_order_of_use() -> None:
    specs = wide_specs(config_of())
    assert [spec.name for spec in specs] == ["embed", "layers.0", "layers.1", "head"]


def test_a_layer_of_llama_3_2_1b() -> None:
    specs = wide_specs(parse_config(CONFIGS["Llama-3.2-1B"]))
    assert shapes(specs, "layers.15") == {
        "model.layers.15.input_layernorm.weight": (2048,),
        "model.layers.15.self_attn.qkv_proj.weight": (2048 + 512 + 512, 2048),
        "model.layers.15.self_attn.o_proj.weight": (2048, 2048),
        "model.layers.15.post_attention_layernorm.weight": (2048,),
        "model.layers.15.mlp.gate_up_proj.weight": (16384, 2048),
        "model.layers.15.mlp.down_proj.weight": (2048, 8192),
    }


# Numbers of parameters as the model cards state them (tied tables counted once).
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("Llama-3.2-1B", 1_235_814_400),
        ("Llama-2-7b", 6_738_415_616),
        ("SmolLM2-135M", 134_515_008),
        ("Mistral-7B-v0.1", 7_241_732_096),
        ("Mistral-7B-v0.3", 7_248_023_552),
        ("Qwen2.5-0.5B", 494_032_768),
        ("Qwen3-4B", 4_022_468_096),
        ("Phi-3-mini-4k", 3_821_079_552),
        ("Phi-4-mini", 3_836_021_760),
        ("gpt-oss-20b", 20_914_757_184),
    ],
)
def test_real_models_have_as_many_parameters_as_published(name: str, count: int) -> None:
    specs = wide_specs(parse_config(CONFIGS[name]))
    assert sum(prod(param.shape) for spec in specs for param in spec.params) == count


def test_biases_and_head_norms_appear_where_the_family_has_them() -> None:
    qwen2 = names(wide_specs(config_of("qwen2")), "layers.0")
    assert [name for name in qwen2 if name.endswith("bias")] == ["model.layers.0.self_attn.qkv_proj.bias"]
    qwen3 = shapes(wide_specs(config_of("qwen3", head_dim=16)), "layers.1")
    assert qwen3["model.layers.1.self_attn.q_norm.weight"] == (16,)
    assert qwen3["model.layers.1.self_attn.k_norm.weight"] == (16,)
    llama = shapes(wide_specs(config_of(attention_bias=True, mlp_bias=True)), "layers.0")
    assert {name: shape for name, shape in llama.items() if name.endswith("bias")} == {
        "model.layers.0.self_attn.qkv_proj.bias": (96,),
        "model.layers.0.self_attn.o_proj.bias": (48,),
        "model.layers.0.mlp.gate_up_proj.bias": (160,),
        "model.layers.0.mlp.down_proj.bias": (48,),
    }


def test_fused_parameters_say_where_their_parts_are() -> None:
    params = {param.name: param for param in wide_specs(config_of("qwen2", head_dim=20))[1].params}
    qkv = (Section("q", 80), Section("k", 40), Section("v", 40))
    assert params["model.layers.0.self_attn.qkv_proj.weight"].sections == qkv
    assert params["model.layers.0.self_attn.qkv_proj.bias"].sections == qkv
    assert params["model.layers.0.mlp.gate_up_proj.weight"].sections == (Section("gate", 80), Section("up", 80))
    assert params["model.layers.0.self_attn.o_proj.weight"].shape == (48, 80)
    assert params["model.layers.0.mlp.down_proj.weight"].sections == (Section("", 48),)


def test_an_untied_model_has_the_table_first_and_a_head_of_its_own() -> None:
    specs = wide_specs(config_of())
    assert names(specs, "embed") == ["model.embed_tokens.weight"]
    assert names(specs, "head") == ["model.norm.weight", "lm_head.weight"]
    assert not is_tied(specs)


def test_a_tied_model_has_its_one_matrix_at_the_end() -> None:
    specs = wide_specs(config_of(tie_word_embeddings=True))
    assert names(specs, "embed") == []
    assert names(specs, "head") == ["model.norm.weight", "model.embed_tokens.weight"]
    assert is_tied(specs)


def test_the_caller_may_know_better_than_the_configuration_whether_the_head_is_tied() -> None:
    assert names(wide_specs(config_of(tie_word_embeddings=True), tied=False), "head")[1] == "lm_head.weight"
    assert names(wide_specs(config_of(), tied=True), "head")[1] == "model.embed_tokens.weight"


def test_a_tied_head_that_is_quantized_stands_beside_the_wide_table() -> None:
    config = config_of(tie_word_embeddings=True)
    specs = layer_specs(config, dtype=DType.BF16, policy=OneScheme(RowScales(), head=True))
    norm, table, head = specs[-1].params
    assert (norm.kind, table.kind, head.kind) == (ParamKind.NORM, ParamKind.EMBEDDING, ParamKind.HEAD)
    assert {name: spec.dtype for name, spec in table.storage().items()} == {"weight": DType.BF16}
    assert {name: spec.dtype for name, spec in head.storage().items()} == {
        "weight": DType.I8,
        "weight_scale": DType.F32,
    }
    assert head.shape == (101, 48)


def test_the_policy_decides_by_kind_and_name() -> None:
    specs = layer_specs(config_of("qwen2"), dtype=DType.F16, policy=OneScheme(RowScales()))
    for spec in specs:
        for param in spec.params:
            assert (param.scheme.name == "none") is (param.kind is not ParamKind.LINEAR)
            assert param.dtype is DType.F16
    stored = specs[1].params[1].storage()
    assert stored["weight"].nbytes == 96 * 48
    assert stored["weight_scale"].shape == (96,)


# --- names


def checkpoint_names(config: ModelConfig) -> list[str]:
    """What Hugging Face checkpoints hold of one layer."""
    parts = ["self_attn.o_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    if config.model_type == "phi3":
        parts += ["self_attn.qkv_proj", "mlp.gate_up_proj"]
    else:
        parts += [f"self_attn.{letter}_proj" for letter in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    if config.qk_norm:
        parts += ["self_attn.q_norm", "self_attn.k_norm"]
    found = [f"model.layers.0.{part}.weight" for part in parts]
    if config.qkv_bias:
        found += [f"model.layers.0.self_attn.{letter}_proj.bias" for letter in "qkv"]
    return found


@pytest.mark.parametrize("model_type", ["llama", "mistral", "phi3", "qwen2", "qwen3"])
def test_a_checkpoint_fills_every_section_of_a_layer_exactly_once(model_type: str) -> None:
    config = config_of(model_type)
    wanted = {(param.name, section) for param in wide_specs(config)[1].params for section in range(len(param.sections))}
    found = []
    for name in checkpoint_names(config):
        target = weight_map(config).locate(name)
        assert isinstance(target, Target)
        found += [(target.param, section) for section in range(target.first, target.stop)]
    assert len(found) == len(set(found))
    assert set(found) == wanted


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("model.layers.1.self_attn.k_proj.weight", Target("model.layers.1.self_attn.qkv_proj.weight", 1, 2)),
        ("model.layers.1.self_attn.v_proj.bias", Target("model.layers.1.self_attn.qkv_proj.bias", 2, 3)),
        ("model.layers.1.self_attn.qkv_proj.weight", Target("model.layers.1.self_attn.qkv_proj.weight", 0, 3)),
        ("model.layers.0.mlp.up_proj.weight", Target("model.layers.0.mlp.gate_up_proj.weight", 1, 2)),
        ("model.layers.0.mlp.gate_up_proj.weight", Target("model.layers.0.mlp.gate_up_proj.weight", 0, 2)),
        ("model.embed_tokens.weight", Target("model.embed_tokens.weight")),
        ("lm_head.weight", Target("lm_head.weight")),
        ("model.norm.weight", Target("model.norm.weight")),
    ],
)
def test_where_a_tensor_goes(name: str, target: Target) -> None:
    assert weight_map(config_of()).locate(name) == target


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "rotary"),
        ("model.rotary_emb.inv_freq", "rotary"),
        ("rotary_pos_emb.inv_freq", "rotary"),
        ("model.layers.0.self_attn.rotary_emb.cos_cached", "rotary"),
        ("model.layers.0.self_attn.rotary_emb.sin_cached", "rotary"),
        ("model.layers.0.self_attn.masked_bias", "mask"),
        ("model.layers.1.attn.bias", "mask"),
        ("model.layers.1.self_attn.bias", "mask"),
        ("model.embeddings.position_ids", "positions"),
        ("model.embed_positions_ids", "positions"),
        ("model.layers.2.mlp.down_proj.weight", "layer 2 lies beyond num_hidden_layers = 2"),
        ("model.layers.61.eh_proj.weight", "layer 61"),
    ],
)
def test_what_is_dropped_and_why(name: str, reason: str) -> None:
    found = weight_map(config_of()).locate(name)
    assert isinstance(found, Dropped)
    assert reason in found.reason


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.qkv_proj.bias",
        "model.layers.0.self_attn.o_proj.bias",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
    ],
)
def test_nothing_that_may_be_a_weight_is_dropped(name: str) -> None:
    assert isinstance(weight_map(config_of()).locate(name), Target)


def test_the_rename_only_view_does_not_stack() -> None:
    assert weight_map(config_of()).rename("model.layers.0.self_attn.q_proj") == "model.layers.0.self_attn.q_proj"


def test_only_biases_of_linear_layers_without_one_are_optional() -> None:
    specs = wide_specs(config_of("qwen2"))
    assert is_optional_bias("model.layers.0.mlp.gate_up_proj.bias", specs=specs)
    assert is_optional_bias("lm_head.bias", specs=specs)
    assert not is_optional_bias("model.layers.0.self_attn.qkv_proj.bias", specs=specs)  # it has one: required
    assert not is_optional_bias("model.norm.bias", specs=specs)
    assert not is_optional_bias("model.layers.0.mlp.other_proj.bias", specs=specs)
    assert not is_optional_bias("model.layers.0.mlp.gate_up_proj.weight", specs=specs)


def test_parameters_come_in_the_order_in_which_a_layer_uses_them() -> None:
    used = ["input_layernorm", "qkv_proj", "q_norm", "k_norm", "o_proj", "post_attention_layernorm", "gate_up", "down"]
    found = names(wide_specs(config_of("qwen3")), "layers.0")
    places = [next(index for index, name in enumerate(found) if part in name) for part in used]
    assert all(first < second for first, second in pairwise(places))

"""Filling a shell: parts find their place, dtypes are converted, schemes are applied, gaps and strays are all named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from layers.architecture import layer_specs
from layers.config import weight_map
from layers.decoder import DecoderModel, build_shell
from layers.eager import fill_shell
from layers.errors import WeightError
from quant.dtypes import DType
from tests.layers.row_scales import RowScales, quantized
from tests.layers.tiny import OneScheme, config_of, fill, random_weights, run, some_ids, wide_specs

QKV = (48, 24, 24)


def split_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same checkpoint with its parts stored one by one."""
    found = {}
    for name, tensor in weights.items():
        if "qkv_proj" in name:
            parts = dict(zip(("q_proj", "k_proj", "v_proj"), torch.split(tensor, list(QKV)), strict=True))
            found.update({name.replace("qkv_proj", part): rows for part, rows in parts.items()})
        elif "gate_up_proj" in name:
            gate, up = torch.split(tensor, 80)
            found.update({name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up})
        else:
            found[name] = tensor
    return found


def test_parts_stored_one_by_one_or_fused_make_the_same_model() -> None:
    config = config_of("qwen2")
    weights = random_weights(config)
    fused, split = (fill(config, wide_specs(config), each) for each in (weights, split_names(weights)))
    assert len(split_names(weights)) == len(weights) + 2 * (2 + 2 + 1)
    for name, parameter in fused.named_parameters():
        assert torch.equal(parameter, weights[name])
        assert torch.equal(parameter, split.get_parameter(name))


def test_a_reversed_order_of_names_changes_nothing() -> None:
    config, weights = config_of("phi3"), random_weights(config_of("phi3"))
    backwards = dict(reversed(split_names(weights).items()))
    model = fill(config, wide_specs(config), backwards)
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())


def test_wide_weights_take_the_dtype_of_the_model() -> None:
    config = config_of()
    weights = random_weights(config)
    model = fill(config, wide_specs(config, dtype=DType.BF16), weights)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name].bfloat16())


@pytest.mark.parametrize("row_multiple", [0, 1, 7])
def test_each_part_of_a_quantized_weight_is_quantized_by_itself(row_multiple: int) -> None:
    config = config_of()
    weights = random_weights(config)
    weights["model.layers.0.self_attn.qkv_proj.weight"][48:72] *= 50  # a part whose scale must not reach the others
    scheme = RowScales(row_multiple)
    specs = layer_specs(config, dtype=DType.BF16, policy=OneScheme(scheme))
    model = fill(config, specs, split_names(weights))
    attention = model.layers[0].get_submodule("self_attn.qkv_proj")
    stored = {name: attention.get_parameter(name) for name in ("weight", "weight_scale")}
    found = scheme.dequantize(stored, QKV, dtype=torch.float32)
    wanted = quantized(weights["model.layers.0.self_attn.qkv_proj.weight"], QKV, row_multiple=row_multiple)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    assert model.get_parameter("model.embed_tokens.weight").dtype == torch.bfloat16
    assert model.get_parameter("lm_head.weight").dtype == torch.bfloat16


def test_stored_tensors_start_at_addresses_that_are_multiples_of_64() -> None:
    config = config_of("qwen2", hidden_size=36, head_dim=6, intermediate_size=37, vocab_size=7)
    specs = layer_specs(config, dtype=DType.BF16, policy=OneScheme(RowScales(3), head=True))
    model = fill(config, specs, random_weights(config))
    assert {parameter.data_ptr() % 64 for parameter in model.parameters()} == {0}


# --- tied


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("scheme", [None, RowScales()], ids=["wide", "quantized"])
def test_a_tied_matrix_may_be_stored_under_either_name(name: str, scheme: RowScales | None) -> None:
    config = config_of(tie_word_embeddings=True)
    weights = random_weights(config)
    table = weights.pop("model.embed_tokens.weight")
    weights[name] = table
    specs = wide_specs(config)
    if scheme is not None:
        specs = layer_specs(config, dtype=DType.F32, policy=OneScheme(scheme, head=True))
    model = fill(config, specs, weights)
    assert torch.equal(model.get_parameter("model.embed_tokens.weight"), table)
    if scheme is not None:
        assert model.lm_head is not None
        head = scheme.dequantize(model.lm_head.stored(), (101,), dtype=torch.float32)
        torch.testing.assert_close(head, quantized(table, (101,), row_multiple=1), rtol=1e-6, atol=1e-7)


def test_tied_and_untied_are_the_same_when_the_matrices_are() -> None:
    config = config_of(tie_word_embeddings=True)
    weights = random_weights(config)
    both = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    tied = fill(config, wide_specs(config), weights)
    untied = fill(config, wide_specs(config, tied=False), both)
    assert torch.equal(run(tied, some_ids(9)), run(untied, some_ids(9)))


# --- what does not fit


def refuse(change: Callable[[dict[str, torch.Tensor]], object], *, tied: bool = False) -> str:
    config = config_of("qwen2", tie_word_embeddings=tied)
    weights = split_names(random_weights(config))
    change(weights)
    with pytest.raises(WeightError) as error:
        fill(config, wide_specs(config), weights)
    return str(error.value)


def test_every_gap_and_every_stray_is_named_at_once() -> None:
    def change(weights: dict[str, torch.Tensor]) -> None:
        del weights["model.layers.1.self_attn.k_proj.bias"]
        del weights["model.norm.weight"]
        weights["model.layers.0.mlp.experts.weight"] = torch.zeros(2)

    message = refuse(change)
    assert "nothing fills model.layers.1.self_attn.qkv_proj.bias (part k)" in message
    assert "nothing fills model.norm.weight" in message
    assert "model.layers.0.mlp.experts.weight: the model has no parameter" in message


def test_an_untied_model_needs_its_head() -> None:
    assert "nothing fills lm_head.weight" in refuse(lambda weights: weights.pop("lm_head.weight"))


def test_a_tied_model_needs_its_matrix() -> None:
    message = refuse(lambda weights: weights.pop("model.embed_tokens.weight"), tied=True)
    assert "nothing fills model.embed_tokens.weight" in message


def test_a_head_beside_a_tied_table_is_not_passed_over() -> None:
    message = refuse(lambda weights: weights.update({"lm_head.weight": torch.zeros(101, 48)}), tied=True)
    assert "lm_head.weight is there beside model.embed_tokens.weight" in message
    assert "tied=False" in message


def test_parts_beside_the_fused_weight_are_not_passed_over() -> None:
    fused = {"model.layers.0.self_attn.qkv_proj.weight": torch.zeros(96, 48)}
    message = refuse(lambda weights: weights.update(fused))
    assert "both fill model.layers.0.self_attn.qkv_proj.weight" in message


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("lm_head.weight", torch.zeros(104, 48), ["lm_head.weight is [104, 48]", "makes it [101, 48]"]),
        ("model.layers.0.self_attn.k_proj.weight", torch.zeros(24, 47), ["k_proj.weight is [24, 47]", "[24, 48]"]),
        ("model.norm.weight", torch.zeros(48, dtype=torch.int8), ["model.norm.weight", "int8", "float dtype"]),
    ],
)
def test_a_tensor_of_the_wrong_shape_or_kind_is_named(name: str, tensor: torch.Tensor, words: list[str]) -> None:
    message = refuse(lambda weights: weights.update({name: tensor}))
    assert all(word in message for word in words)


def test_a_bias_without_a_home_passes_only_when_it_is_zero() -> None:
    config = config_of()
    weights = random_weights(config)
    plain = fill(config, wide_specs(config), weights)
    zero = {**weights, "model.layers.0.mlp.down_proj.bias": torch.zeros(48)}
    assert torch.equal(run(fill(config, wide_specs(config), zero), [1, 2]), run(plain, [1, 2]))
    message = refuse(lambda found: found.update({"model.layers.0.mlp.down_proj.bias": torch.full((48,), 1e-6)}))
    assert "model.layers.0.mlp.down_proj.bias: the model has no parameter" in message


def test_dropped_tensors_are_not_even_asked_for() -> None:
    config = config_of()
    weights = random_weights(config)
    unused = ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.7.mlp.down_proj.weight"]
    model: DecoderModel = build_shell(config, wide_specs(config))
    names = [*weights, *unused]
    fill_shell(model, wide_specs(config), weight_map(config), names=names, get_tensor=weights.__getitem__)
    assert not any(parameter.is_meta for parameter in model.parameters())

"""compressed-tensors checkpoints: read to their place, equal to what they stand for, and to what `quantize` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel, write_tiny_model
from layers.config import parse_config
from streaming import LLM, LoadOptions, cli
from streaming.compressed_layout import SAVED
from streaming.errors import CheckpointError
from streaming.prepare import Prepared, prepare
from tests.layers.tiny import raw_config
from tests.quant.compressed import Encoded, args, config, float4, float8, integers
from tests.streaming.coded import Encode, Tensors, logits_of, write_coded
from tests.streaming.resident import same_bits
from tests.streaming.test_gptq_and_awq import expert_weights

IDS = [5, 9, 7, 21]


def int4(module: str, weight: torch.Tensor) -> Encoded:
    return integers(weight, bits=4, size=32)


def int4_asym(module: str, weight: torch.Tensor) -> Encoded:
    return integers(weight, bits=4, size=24, symmetric=False, dtype=torch.float16)  # no multiple: the last one is short


def int4_ordered(module: str, weight: torch.Tensor) -> Encoded:
    tensors, _ = integers(weight, bits=4, size=16)
    order = torch.randperm(weight.shape[1]) // 16
    codes = tensors["weight_packed"].view(torch.uint8)
    numbers = torch.stack((codes & 15, codes >> 4), 2).flatten(1).float() - 8
    return tensors | {"weight_g_idx": order.int()}, numbers * tensors["weight_scale"].float()[:, order]


def int8(module: str, weight: torch.Tensor) -> Encoded:
    tensors, wide = integers(weight, bits=8, size=0, dtype=torch.float32, as_words=False)
    return tensors | {"input_scale": torch.ones(1), "input_zero_point": torch.zeros(1, dtype=torch.int8)}, wide


def int8_packed(module: str, weight: torch.Tensor) -> Encoded:
    return integers(weight, bits=8, size=0, symmetric=False)


def int3(module: str, weight: torch.Tensor) -> Encoded:
    return integers(weight, bits=3, size=64)


def fp8(module: str, weight: torch.Tensor) -> Encoded:
    scale = weight.float().abs().amax(1, keepdim=True) / 400
    tensors, wide = float8(weight, scale.bfloat16(), scale.bfloat16())
    return tensors | {"output_scale": torch.ones(1)}, wide


def fp8_tensor(module: str, weight: torch.Tensor) -> Encoded:
    scale = torch.tensor([0.004 * (1 + len(module) % 5)])
    return float8(weight, scale, scale)


def fp8_group(module: str, weight: torch.Tensor) -> Encoded:
    scale = torch.rand(weight.shape[0], weight.shape[1] // 16).add(1.0).mul(0.001)
    return float8(weight, scale, scale.repeat_interleave(16, 1))


def mxfp4(module: str, weight: torch.Tensor) -> Encoded:
    return float4(weight, block=32)


def nvfp4(module: str, weight: torch.Tensor) -> Encoded:
    return float4(weight, block=16, divisor=300.0 + len(module))


FORMS: dict[str, tuple[Encode, dict[str, Any]]] = {
    "int4": (int4, args(4, "int", "group", group_size=32)),
    "int4_asym": (int4_asym, args(4, "int", "group", group_size=24) | {"symmetric": False}),
    "int4_ordered": (int4_ordered, args(4, "int", "group", group_size=16, actorder="group")),
    "int8": (int8, args(8, "int", "channel")),
    "int8_packed": (int8_packed, args(8, "int", "channel") | {"symmetric": False}),
    "int3": (int3, args(3, "int", "group", group_size=64)),
    "fp8": (fp8, args(8, "float", "channel")),
    "fp8_tensor": (fp8_tensor, args(8, "float", "tensor")),
    "fp8_group": (fp8_group, args(8, "float", "group", group_size=16)),
    "mxfp4": (mxfp4, args(4, "float", "group", group_size=32)),
    "nvfp4": (nvfp4, args(4, "float", "tensor_group", group_size=16)),
}


def write(folder: Path, form: str, *, family: str = "llama", layers: int = 2, **more: object) -> tuple[Path, Path]:
    encode, weights = FORMS[form]
    torch.manual_seed(0)
    return write_coded(folder, encode, config=config(weights) | more, model=TinyModel(layers=layers, family=family))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "phi3"])  # phi3's projections are fused on disk
def test_logits_are_those_of_the_numbers_that_the_codes_stand_for(tmp_path: Path, form: str, family: str) -> None:
    coded, twin = write(tmp_path, form, family=family)
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("head_dim", [2, 8])
def test_weights_of_a_few_rows_are_read_like_others(tmp_path: Path, form: str, head_dim: int) -> None:
    encode, weights = FORMS[form]
    torch.manual_seed(0)
    small = TinyModel(layers=1, heads=32 // head_dim, kv_heads=1, head_dim=head_dim)  # k and v: a word of rows, or less
    coded, twin = write_coded(tmp_path, encode, config=config(weights), model=small)
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_verify_finds_the_streamed_model_equal_to_the_resident_one(
    tmp_path: Path, form: str, capfd: pytest.CaptureFixture[str]
) -> None:
    coded, _ = write(tmp_path, form, layers=1)
    assert cli.run(["verify", str(coded)]) == 0, capfd.readouterr().err
    assert "equal to the bit" in capfd.readouterr().out


def items_of(prepared: Prepared, *leaves: str) -> dict[str, set[bool]]:
    """leaf -> whether its items are read straight to their place."""
    return {leaf: {item.direct for item in prepared.plan.items if item.leaf == leaf} for leaf in leaves}


@pytest.mark.parametrize("strategy", ["direct", "lazy", "eager", "prefetch"])
@pytest.mark.parametrize("form", ["int4", "int8", "mxfp4"])
def test_words_and_bytes_of_codes_are_read_to_their_place(tmp_path: Path, form: str, strategy: str) -> None:
    coded, _ = write(tmp_path, form)
    on_disk = load_file(coded / "model.safetensors")
    codes = "weight" if form == "int8" else "weight_packed"
    prepared = prepare(str(coded), LoadOptions())
    assert items_of(prepared, codes, "weight_scale") == {codes: {True}, "weight_scale": {form == "mxfp4"}}
    with LLM(str(coded), safetensors_load_strategy=strategy) as llm:
        llm.wait_loaded()
        kept = dict(llm.shell.named_parameters())["model.layers.1.self_attn.qkv_proj.weight"]
        parts = [on_disk[f"model.layers.1.self_attn.{part}_proj.{codes}"].view(torch.uint8) for part in "qkv"]
        assert same_bits(kept.view(torch.uint8), torch.cat(parts))
        assert llm.stats().bytes_read == prepared.plan.read_nbytes


def test_only_what_is_not_ignored_is_quantized(tmp_path: Path) -> None:
    ignore = ["re:.*self_attn.*", "re:.*mlp\\.(gate|up)_proj$", "lm_head"]

    def only_down(module: str, weight: torch.Tensor) -> Encoded | None:
        return int4(module, weight) if module.endswith("down_proj") else None

    coded, twin = write_coded(tmp_path, only_down, config=config(FORMS["int4"][1], ignore=ignore))
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=2e-5, atol=2e-5)
    kept = {p.name: p.scheme.name for spec in prepare(str(coded), LoadOptions()).specs for p in spec.params}
    assert kept["model.layers.0.self_attn.qkv_proj.weight"] == "none"
    assert kept["model.layers.0.mlp.down_proj.weight"] == "int4_per_group"


def test_every_group_has_a_form_of_its_own(tmp_path: Path) -> None:
    groups = {
        "a": {"targets": ["re:.*self_attn.*"], "weights": FORMS["fp8"][1], "format": "float-quantized"},
        "b": {"targets": ["Linear"], "weights": FORMS["int4"][1], "format": "pack-quantized"},
    }

    def by_module(module: str, weight: torch.Tensor) -> Encoded:
        return fp8(module, weight) if "self_attn" in module else int4(module, weight)

    mixed = config({}, config_groups=groups, format="mixed-precision")
    coded, twin = write_coded(tmp_path, by_module, config=mixed)
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=2e-5, atol=2e-5)


def test_what_is_not_used_is_told_with_the_reason(tmp_path: Path) -> None:
    coded, _ = write(tmp_path, "fp8", kv_cache_scheme={"num_bits": 8, "type": "float"})
    dropped = prepare(str(coded), LoadOptions()).plan.dropped
    assert dropped["model.layers.0.self_attn.k_proj.output_scale"].startswith("KV-cache scale")
    assert dropped["model.layers.0.mlp.up_proj.output_scale"].startswith("scale of quantized activations")
    packed, _ = write(tmp_path / "packed", "int4")
    assert (
        "weight's shape" in prepare(str(packed), LoadOptions()).plan.dropped["model.layers.0.mlp.up_proj.weight_shape"]
    )


def test_all_faults_that_headers_show_come_in_one_report(tmp_path: Path) -> None:
    coded, _ = write(tmp_path, "int4_asym")
    tensors = load_file(coded / "model.safetensors")
    mlp, attention = "model.layers.0.mlp", "model.layers.1.self_attn"
    tensors[f"{mlp}.up_proj.weight_packed"] = tensors[f"{mlp}.up_proj.weight_packed"][:, :-1]
    tensors[f"{mlp}.down_proj.weight_scale"] = tensors[f"{mlp}.down_proj.weight_scale"].double()
    tensors[f"{attention}.o_proj.weight_zero_point"] = tensors[f"{attention}.o_proj.weight_zero_point"].t()
    del tensors[f"{attention}.q_proj.weight_zero_point"]
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, coded / "model.safetensors")
    with pytest.raises(CheckpointError) as raised:
        prepare(str(coded), LoadOptions())
    message = str(raised.value)
    assert "4 problems" in message
    assert "up_proj.weight_packed in model.safetensors: shape [96, 7], but compressed-tensors packed int4" in message
    assert f"{mlp}.down_proj: weight_scale is F64" in message
    assert "o_proj.weight_zero_point in model.safetensors: shape" in message
    assert f"{attention}.q_proj: its weight is not symmetric, but it has no weight_zero_point" in message


def test_an_order_of_groups_that_there_are_not_ends_the_load(tmp_path: Path) -> None:
    coded, _ = write(tmp_path, "int4_ordered")
    tensors = load_file(coded / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight_g_idx"][3] = 99
    save_file(tensors, coded / "model.safetensors")
    with pytest.raises(Exception, match=r"weight_g_idx.*g_idx names groups 0 to 99"), LLM(str(coded)) as llm:
        llm.wait_loaded()


@pytest.mark.parametrize("form", ["int4", "int8", "nvfp4"])
def test_another_scheme_over_it_is_refused(tmp_path: Path, form: str) -> None:
    coded, _ = write(tmp_path, form)
    with pytest.raises(
        CheckpointError, match=r"already quantized on disk \(compressed-tensors .*leave --quantization out"
    ):
        prepare(str(coded), LoadOptions(quantization="fp8_per_channel"))


def test_a_configuration_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    coded, _ = write(tmp_path, "int8", sparsity_config={"format": "sparse-24-bitmask"})
    with pytest.raises(CheckpointError, match=r"config.json: quantization_config: .*sparsity_config"):
        prepare(str(coded), LoadOptions())


# --- what `quantize` writes

ROUND = [*SAVED, "int4_per_group:32:asym"]


def parameters(folder: Path, **options: str) -> tuple[Tensors, torch.Tensor]:
    with LLM(str(folder), **options) as llm:  # type: ignore[arg-type]
        logits = llm.logits(IDS).clone()
        llm.wait_loaded()
        return {name: one.detach().clone() for name, one in llm.shell.named_parameters()}, logits


@pytest.mark.parametrize("scheme", [scheme for scheme in ROUND if scheme != "nvfp4"])
def test_what_quantize_writes_is_what_it_would_have_kept(tmp_path: Path, scheme: str) -> None:
    model = write_tiny_model(tmp_path / "wide", model=TinyModel(layers=2))
    assert cli.run(["quantize", str(model), str(tmp_path / "out"), "--quantization", scheme, "--quiet"]) == 0
    online, logits = parameters(model, quantization=scheme)
    found, again = parameters(tmp_path / "out")
    assert found.keys() == online.keys()
    assert [name for name, tensor in online.items() if not same_bits(found[name], tensor)] == []
    assert same_bits(again, logits)


def test_nvfp4_comes_back_with_the_global_scale_that_divides(tmp_path: Path) -> None:
    """The layout divides by it: what is kept is its reciprocal, rounded."""
    model = write_tiny_model(tmp_path / "wide", model=TinyModel(layers=2))
    assert cli.run(["quantize", str(model), str(tmp_path / "out"), "--quantization", "nvfp4", "--quiet"]) == 0
    online, logits = parameters(model, quantization="nvfp4")
    found, again = parameters(tmp_path / "out")
    assert found.keys() == online.keys()
    for name, tensor in online.items():
        if name.endswith("global_scale"):
            torch.testing.assert_close(found[name], tensor.reciprocal(), rtol=0, atol=0)
        else:
            assert same_bits(found[name], tensor), name
    torch.testing.assert_close(again, logits, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("tied", [False, True])
def test_modules_of_several_schemes_and_the_head_come_back_too(tmp_path: Path, tied: bool) -> None:
    rules = {
        "default": "int4_per_group",
        "rules": [
            {"match": "mlp.down_proj", "scheme": "fp8_per_tensor"}, {"match": "lm_head", "scheme": "int8_per_channel"},
        ],
        "ignore": ["model.layers.0.self_attn"],
    }  # fmt: skip
    (tmp_path / "rules.json").write_text(json.dumps(rules), encoding="utf-8")
    model, how = write_tiny_model(tmp_path / "wide", model=TinyModel(layers=2, tied=tied)), str(tmp_path / "rules.json")
    assert cli.run(["quantize", str(model), str(tmp_path / "out"), "--quantization-config", how, "--quiet"]) == 0
    online, logits = parameters(model, quantization_config=how)
    found, again = parameters(tmp_path / "out")
    assert "lm_head.weight_scale" in online
    assert "model.layers.0.self_attn.qkv_proj.weight_scale" not in online
    assert [name for name, tensor in online.items() if not same_bits(found[name], tensor)] == []
    assert same_bits(again, logits)


@pytest.mark.parametrize("form", ["int4_ordered", "nvfp4"])
def test_experts_are_kept_in_their_own_codes(tmp_path: Path, form: str) -> None:
    encode, weights = FORMS[form]
    raw = raw_config(
        "qwen3_moe", hidden_size=64, num_hidden_layers=1, moe_intermediate_size=32, num_experts=3,
        num_experts_per_tok=2, head_dim=16,
    )  # fmt: skip
    coded, twin = (expert_weights(parse_config(raw)) for _ in range(2))
    for name in [name for name in coded if "_proj." in name]:
        made = encode(name, coded.pop(name))
        assert made is not None
        coded |= {f"{name.removesuffix('.weight')}.{leaf}": tensor.contiguous() for leaf, tensor in made[0].items()}
        twin[name] = made[1]
    stated = config(weights) | {"ignore": ["lm_head", "re:.*mlp.gate$"]}
    for folder, found, stands in (("coded", coded, raw | {"quantization_config": stated}), ("twin", twin, raw)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(stands), encoding="utf-8")
        save_file(found, tmp_path / folder / "model.safetensors")
    expected = logits_of(tmp_path / "twin", IDS)
    torch.testing.assert_close(logits_of(tmp_path / "coded", IDS), expected, rtol=2e-5, atol=2e-5)

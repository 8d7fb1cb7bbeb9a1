"""Weights that are quantized on disk are kept as they are there: equal to the bit to what their numbers stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel
from streaming import LLM, LoadOptions, cli
from streaming.errors import CheckpointError
from streaming.prepare import prepare
from tests.streaming.coded import Tensors, logits_of, write_coded
from tests.streaming.resident import same_bits

IDS = [5, 9, 7, 21]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {**FP8, "weight_block_size": [128, 128]}


def per_tensor(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The scales of q, k and v differ, as do those of gate and up."""
    scale = torch.tensor(0.004 * (1 + len(module) % 5))
    codes = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, codes.float() * scale


def per_row(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.float().abs().amax(1, keepdim=True) / 400
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def per_block(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    rows, columns = weight.shape
    grid = torch.rand(-(-rows // 128), -(-columns // 128)).add_(0.5).mul_(0.003).bfloat16()
    scale = grid.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    codes = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": grid}, codes.float() * scale


FORMS = {"per_tensor": (per_tensor, FP8), "per_row": (per_row, FP8), "per_block": (per_block, BLOCKS)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "phi3"])  # phi3's projections are fused on disk
def test_logits_are_those_of_the_numbers_that_the_codes_stand_for(tmp_path: Path, form: str, family: str) -> None:
    encode, config = FORMS[form]
    coded, twin = write_coded(tmp_path, encode, config=config, model=TinyModel(layers=2, family=family))
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strategy", ["direct", "lazy", "eager", "prefetch"])
def test_codes_on_disk_are_the_codes_that_are_kept(tmp_path: Path, form: str, strategy: str) -> None:
    encode, config = FORMS[form]
    coded, _ = write_coded(tmp_path, encode, config=config)
    on_disk = load_file(coded / "model.safetensors")
    with LLM(str(coded), safetensors_load_strategy=strategy) as llm:
        llm.wait_loaded()
        kept = dict(llm.shell.named_parameters())
        parts = [on_disk[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
        assert same_bits(kept["model.layers.1.self_attn.qkv_proj.weight"], torch.cat(parts))
        assert llm.stats().bytes_read == prepare(str(coded), LoadOptions()).plan.read_nbytes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scheme", ["none", "int8_per_channel", "fp8_per_tensor", "fp8_per_block"])
def test_verify_finds_the_streamed_model_equal_to_the_resident_one(
    tmp_path: Path, form: str, scheme: str, capfd: pytest.CaptureFixture[str]
) -> None:
    encode, config = FORMS[form]
    coded, _ = write_coded(tmp_path, encode, config=config)
    assert cli.run(["verify", str(coded), "--quantization", scheme]) == 0, capfd.readouterr().err
    assert "equal to the bit" in capfd.readouterr().out


def test_another_scheme_is_made_from_the_wide_numbers_section_by_section(tmp_path: Path) -> None:
    coded, twin = write_coded(tmp_path, per_block, config=BLOCKS)
    wanted = logits_of(twin, IDS, quantization="int8_per_channel")
    torch.testing.assert_close(logits_of(coded, IDS, quantization="int8_per_channel"), wanted, rtol=1e-5, atol=1e-5)
    plan = prepare(str(coded), LoadOptions(quantization="int8_per_channel"))
    assert plan.budget.convert_nbytes > 0  # what holds one weight until it is whole


def test_a_weight_that_stays_wide_beside_its_neighbours_is_read_wide(tmp_path: Path) -> None:
    def all_but_v(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        return None if module.endswith(("v_proj", "layers.1.mlp.down_proj")) else per_tensor(module, weight)

    coded, twin = write_coded(tmp_path, all_but_v, config=FP8)
    prepared = prepare(str(coded), LoadOptions())
    assert [note for note in prepared.warnings if "qkv_proj.weight and 1 more: its parts" in note]
    kept = {param.name: param.scheme.name for spec in prepared.specs for param in spec.params}
    assert kept["model.layers.0.self_attn.qkv_proj.weight"] == "none"
    assert kept["model.layers.0.mlp.down_proj.weight"] == "fp8_per_tensor"
    assert kept["model.layers.1.mlp.down_proj.weight"] == "none"
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=1e-5, atol=1e-5)


def test_what_a_configuration_excludes_is_not_quantized_while_loading_either(tmp_path: Path) -> None:
    config = {**FP8, "modules_to_not_convert": ["model.layers.1", "lm_head"]}

    def first_layer(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        return per_tensor(module, weight) if ".layers.0." in module else None

    coded, _ = write_coded(tmp_path, first_layer, config=config)
    prepared = prepare(str(coded), LoadOptions(quantization="int8_per_channel"))
    kept = {param.name: param.scheme.name for spec in prepared.specs for param in spec.params}
    assert kept["model.layers.0.mlp.down_proj.weight"] == "int8_per_channel"
    assert kept["model.layers.1.mlp.down_proj.weight"] == "none"


def test_all_faults_that_headers_show_come_in_one_report(tmp_path: Path) -> None:
    coded, _ = write_coded(tmp_path, per_tensor, config=FP8)
    tensors = load_file(coded / "model.safetensors")
    del tensors["model.layers.0.mlp.down_proj.weight_scale"]
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = torch.ones(3)
    tensors["model.layers.1.self_attn.o_proj.weight"] = tensors["model.layers.1.self_attn.o_proj.weight"][:-1]
    tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(64, 64, dtype=torch.float8_e5m2)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, coded / "model.safetensors")
    with pytest.raises(CheckpointError) as raised:
        prepare(str(coded), LoadOptions())
    message = str(raised.value)
    assert "model.layers.0.mlp.down_proj: its weight is FP8, but it has no scale (weight_scale_inv or" in message
    assert "up_proj.weight_scale in model.safetensors: shape [3], but FP8, scales per channel makes it" in message
    assert "o_proj.weight in model.safetensors: shape [63, 64]" in message
    assert "model.layers.1.self_attn.q_proj: weight is F8_E5M2" in message


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "hqq"}, "quant_method 'hqq': checkpoints that are quantized by"),
        ({"bits": 4}, "no quant_method"),
        ("fp8", "quantization_config is 'fp8', not an object"),
        ({**FP8, "weight_block_size": "wide"}, "weight_block_size 'wide'"),
        ({**FP8, "modules_to_not_convert": [1]}, "modules_to_not_convert '[1]': a list of names is needed"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_one_clear_line(tmp_path: Path, config: object, words: str) -> None:
    coded, _ = write_coded(tmp_path, per_tensor, config=FP8)
    raw = json.loads((coded / "config.json").read_text(encoding="utf-8"))
    (coded / "config.json").write_text(json.dumps(raw | {"quantization_config": config}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json: quantization_config") as raised:
        prepare(str(coded), LoadOptions())
    assert words in str(raised.value)

"""`quantize` of models with experts, of FP8 checkpoints, and by a configuration of several schemes."""

from __future__ import annotations

import json
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel, write_tiny_model
from quant.dtypes import to_torch
from streaming import LLM, cli
from streaming.options import LoadOptions
from streaming.prepare import prepare
from tests.layers.family_cases import FAMILY_CASES
from tests.streaming.coded import Tensors, write_coded
from tests.streaming.resident import same_bits
from tests.streaming.test_quantize import config_of, load_with_transformers, tensors_of
from tests.test_against_transformers import write_checkpoint

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def scaled(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """fp8 with a scale for each tensor; those of q, k and v differ."""
    scale = torch.tensor(0.004 * (1 + len(module) % 5))
    codes = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def quantize(model: Path, out: Path, *options: str) -> None:
    assert cli.run(["quantize", str(model), str(out), "--quiet", *options]) == 0


def refusal(capfd: pytest.CaptureFixture[str], model: Path, *options: str) -> str:
    """The one line of a command that writes nothing."""
    capfd.readouterr()
    assert cli.run(["quantize", str(model), str(model / "out"), "--quiet", *options]) == 2
    assert not (model / "out").exists()
    (line,) = capfd.readouterr().err.splitlines()
    return line


def stands_for(model: Path, **options: Any) -> dict[str, torch.Tensor]:
    """What the stored weights of a load stand for, in the model's dtype, by the names of the family's checkpoints."""
    found: dict[str, torch.Tensor] = {}
    prepared = prepare(str(model), LoadOptions(**options))
    with LLM(model, **options) as llm:
        llm.wait_loaded()
        kept = dict(llm.shell.named_parameters())
        for param in (param for spec in prepared.specs for param in spec.params if param.scheme.name != "none"):
            module = param.name.rpartition(".")[0]
            stored = {name: kept[f"{module}.{name}"] for name in param.storage()}
            dtype = to_torch(prepared.dtype)
            wide = param.scheme.dequantize(stored, param.kept_rows, dtype=dtype, in_features=param.shape[1])
            for name, part in zip(
                _names(module, len(param.sections)), wide.split(list(param.section_rows)), strict=True
            ):
                found[f"{name}.weight"] = part.clone()
    return found


def _names(module: str, sections: int) -> list[str]:
    parent, _, last = module.rpartition(".")
    parts = PARTS.get(last, (last,)) if sections > 1 or last == "down_proj" else (last,)
    if parent.endswith(".experts"):
        return [f"{parent}.{expert}.{part}" for expert in range(sections // len(parts)) for part in parts]
    return [f"{parent}.{part}" for part in parts]


def read_by_transformers(folder: Path) -> dict[str, torch.Tensor]:
    """The wide weights as transformers has them by way of compressed-tensors; experts, which it fuses, taken apart."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in load_with_transformers(folder, dequantize=True).state_dict().items():
        parent, _, last = name.rpartition(".")
        if not parent.endswith(".experts"):
            found[name] = tensor
            continue
        for expert, wide in enumerate(tensor):
            parts = PARTS.get(last, (last,))
            for part, rows in zip(parts, wide.chunk(len(parts)), strict=True):
                found[f"{parent}.{expert}.{part}.weight"] = rows
    return found


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    """A tiny Qwen3 with experts: their projections have 32 and 64 inputs."""
    model_type, changes = FAMILY_CASES["qwen3_moe"]
    changes = {**changes, "vocab_size": 160, "hidden_size": 64, "num_experts": 3, "dtype": "bfloat16"}
    return written_by_transformers(model_type, changes, tmp_path / "moe")


def written_by_transformers(model_type: str, changes: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = import_module("transformers")
        transformers.logging.set_verbosity_error()
        write_checkpoint(transformers, model_type, changes, folder=folder)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_of(folder) | {"dtype": "bfloat16"}))
    return folder


# --- experts


@pytest.mark.parametrize("scheme", ["fp8_per_channel", "fp8_per_tensor", "int4_per_group"])
def test_transformers_reads_experts_as_what_their_stored_forms_stand_for(
    moe: Path, tmp_path: Path, scheme: str
) -> None:
    quantize(moe, tmp_path / "out", "--quantization", scheme)
    weights, expected = read_by_transformers(tmp_path / "out"), stands_for(moe, quantization=scheme)
    assert sum(".experts.2." in name for name in expected) == 2 * 3
    for name, weight in expected.items():
        assert same_bits(weights[name], weight), name


def test_there_is_a_module_for_each_expert_and_part_and_routers_are_ignored(moe: Path, tmp_path: Path) -> None:
    quantize(moe, tmp_path / "out", "--quantization", "int8_per_channel")
    source, found = tensors_of(moe), tensors_of(tmp_path / "out")
    codes = {name for name in source if found[name].dtype == torch.int8}
    assert codes == {name for name in source if "proj" in name}
    assert found.keys() == source.keys() | {f"{name}_scale" for name in codes}
    assert all(same_bits(found[name], source[name]) for name in source.keys() - codes)
    ignored = config_of(tmp_path / "out")["quantization_config"]["ignore"]
    assert ignored == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"]


def test_experts_that_are_one_tensor_on_disk_are_written_apart(moe: Path, tmp_path: Path) -> None:
    source = tensors_of(moe)
    fused = {name: tensor for name, tensor in source.items() if ".experts." not in name}
    for layer in range(2):
        module = f"model.layers.{layer}.mlp.experts"
        experts = [{p: source[f"{module}.{e}.{p}_proj.weight"] for p in ("gate", "up", "down")} for e in range(3)]
        fused[f"{module}.gate_up_proj"] = torch.stack([torch.cat([one["gate"], one["up"]]) for one in experts])
        fused[f"{module}.down_proj"] = torch.stack([one["down"] for one in experts])
    other = tmp_path / "fused"
    other.mkdir()
    (other / "config.json").write_text((moe / "config.json").read_text())
    save_file(fused, other / "model.safetensors")
    for folder, out in ((moe, "a"), (other, "b")):
        quantize(folder, tmp_path / out, "--quantization", "fp8_per_tensor")
    apart, found = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    assert found.keys() == apart.keys()
    assert all(same_bits(found[name], apart[name]) for name in apart)


def test_experts_keep_the_names_that_their_family_gives_them(tmp_path: Path) -> None:
    model_type, changes = FAMILY_CASES["mixtral"]
    folder = written_by_transformers(model_type, {**changes, "vocab_size": 160}, tmp_path / "mixtral")
    quantize(folder, tmp_path / "out", "--quantization", "fp8_per_channel")
    source, found = tensors_of(folder), tensors_of(tmp_path / "out")
    assert found.keys() == source.keys() | {f"{name}_scale" for name in source if found[name].dtype.itemsize == 1}
    assert found["model.layers.1.block_sparse_moe.experts.4.w2.weight"].dtype == torch.float8_e4m3fn


def test_experts_with_biases_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model_type, changes = FAMILY_CASES["gpt_oss"]
    folder = written_by_transformers(model_type, {**changes, "vocab_size": 160}, tmp_path / "gpt_oss")
    found = refusal(capfd, folder, "--quantization", "fp8_per_channel")
    assert "its experts have biases, which the compressed-tensors layout lacks" in found


# --- several schemes


def test_a_configuration_gives_a_group_for_each_scheme_and_transformers_reads_them(tmp_path: Path) -> None:
    """In float32: without `dequantize` compressed-tensors keeps scales in the model's own dtype."""
    model = write_tiny_model(tmp_path / "model", model=TinyModel(layers=4, dtype="float32"))
    config = {
        "default": "int4_per_group", "ignore": ["model.layers.1"],
        "rules": [
            {"match": "self_attn", "scheme": "fp8_per_channel", "percentile": 99.5},
            {"match": "model.layers.3.mlp.down_proj", "scheme": "int8_per_channel"},
        ],
    }  # fmt: skip
    quantize(model, tmp_path / "out", "--quantization-config", json.dumps(config))
    found = config_of(tmp_path / "out")["quantization_config"]
    assert found["format"] == "mixed-precision"
    groups = {group["format"]: group["targets"] for group in found["config_groups"].values()}
    assert groups["int-quantized"] == ["model.layers.3.mlp.down_proj"]
    assert len(groups["float-quantized"]) == 3 * 4
    assert "model.layers.1.mlp.up_proj" in found["ignore"]
    expected = stands_for(model, quantization_config=config)
    weights = load_with_transformers(tmp_path / "out", dequantize=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights(torch.tensor([[1, 2]]))  # what is packed is unpacked in the first pass
    state = weights.state_dict()
    for name, weight in expected.items():
        assert same_bits(state[name], weight), name


# --- what is FP8 already


@pytest.mark.parametrize("scheme", ["int8_per_channel", "fp8_per_channel", "mxfp4"])
def test_an_fp8_checkpoint_is_written_as_it_is_quantized_anew(tmp_path: Path, scheme: str) -> None:
    coded, _ = write_coded(tmp_path, scaled, config=FP8)
    quantize(coded, tmp_path / "out", "--quantization", scheme)
    weights = load_with_transformers(tmp_path / "out", dequantize=True).state_dict()
    expected = stands_for(coded, quantization=scheme)
    assert len(expected) == 2 * 7
    for name, weight in expected.items():
        assert same_bits(weights[name], weight), name
    config = config_of(tmp_path / "out")["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"


@pytest.mark.parametrize("family", ["llama", "phi3"])  # phi3's qkv_proj is one module, with one scale on disk
def test_what_is_in_the_scheme_already_is_written_as_it_is(tmp_path: Path, family: str) -> None:
    coded, _ = write_coded(tmp_path, scaled, config=FP8, model=TinyModel(layers=1, family=family))
    quantize(coded, tmp_path / "out", "--quantization", "fp8_per_tensor")
    source, found = tensors_of(coded), tensors_of(tmp_path / "out")
    assert found.keys() == source.keys()
    assert all(same_bits(found[name].flatten(), tensor.flatten()) for name, tensor in source.items())
    load_with_transformers(tmp_path / "out", dequantize=True)


def test_experts_in_fp8_are_quantized_anew(moe: Path, tmp_path: Path) -> None:
    coded: Tensors = {}
    for name, tensor in tensors_of(moe).items():
        module, _, leaf = name.rpartition(".")
        made = scaled(module, tensor)[0] if "proj" in module else {leaf: tensor}
        coded |= {f"{module}.{leaf}": part for leaf, part in made.items()}
    save_file(coded, moe / "model.safetensors")
    (moe / "config.json").write_text(json.dumps(config_of(moe) | {"quantization_config": FP8}))
    quantize(moe, tmp_path / "out", "--quantization", "int4_per_group")
    weights, expected = read_by_transformers(tmp_path / "out"), stands_for(moe, quantization="int4_per_group")
    for name, weight in expected.items():
        assert same_bits(weights[name], weight), name


def test_what_has_no_place_there_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    coded, _ = write_coded(tmp_path, scaled, config=FP8, model=TinyModel(layers=1))
    assert "is quantized already; start from the original, or say" in refusal(capfd, coded)
    whole, tensors = write_tiny_model(tmp_path / "whole", model=TinyModel(layers=1)), tensors_of(coded)
    for file in whole.glob("*.safetensors*"):
        file.unlink()
    attention = "model.layers.0.self_attn"
    parts = [tensors.pop(f"{attention}.{part}_proj.weight") for part in "qkv"]
    scales = [tensors.pop(f"{attention}.{part}_proj.weight_scale") for part in "qkv"]
    tensors |= {f"{attention}.qkv_proj.weight": torch.cat(parts), f"{attention}.qkv_proj.weight_scale": scales[0]}
    save_file(tensors, whole / "model.safetensors")
    (whole / "config.json").write_text(json.dumps(config_of(whole) | {"quantization_config": FP8}))
    found = refusal(capfd, whole, "--quantization", "fp8_per_tensor")
    assert "model.layers.0.self_attn.q_proj shares its scales with its neighbours on disk" in found
    quantize(whole, tmp_path / "out", "--quantization", "fp8_per_channel")

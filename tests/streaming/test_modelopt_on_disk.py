"""ModelOpt's checkpoints: FP8 of every kind and NVFP4, their configuration in either file; what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.write_tiny_model import TinyModel
from streaming import LLM, LoadOptions, cli
from streaming.errors import CheckpointError
from streaming.prepare import prepare
from tests.streaming.coded import Encode, Tensors, logits_of, write_coded
from tests.streaming.resident import same_bits

IDS = [5, 9, 7, 21]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NUMBERS = torch.tensor(E2M1 + [-one for one in E2M1])  # a code's sign is its bit 3


def nvfp4(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    rows, columns = weight.shape
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8)
    scale = torch.rand(rows, -(-columns // 16)).add_(0.2).mul_(200).to(torch.float8_e4m3fn)
    whole = torch.rand(()) * 2e-4
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    wide = NUMBERS[codes.long()] * scale.float().repeat_interleave(16, 1)[:, :columns] * whole
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": whole, "input_scale": torch.tensor(0.25)}
    return tensors, wide


def fp8(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = torch.rand(()) * 0.004 + 0.001
    codes = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.25)}, codes.float() * scale


def fp8_rows(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.float().abs().amax(1) / 448
    codes = (weight.float() / scale.unsqueeze(1)).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.unsqueeze(1)


def fp8_blocks(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    rows, columns = weight.shape
    grid = torch.rand(-(-rows // 128), 1, -(-columns // 128), 1).mul_(0.003).add_(0.001)  # as ModelOpt writes it
    scale = grid[:, 0, :, 0].repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    codes = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": grid}, codes.float() * scale


def mxfp8(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes = torch.randint(115, 122, (weight.shape[0], -(-weight.shape[1] // 32)), dtype=torch.uint8)
    scale = torch.exp2(codes.float() - 127).repeat_interleave(32, 1)[:, : weight.shape[1]]
    numbers = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": codes}, numbers.float() * scale


ALGORITHMS = {
    "FP8": (fp8, "fp8_per_tensor"), "FP8_PER_CHANNEL_PER_TOKEN": (fp8_rows, "fp8_per_channel"),
    "fp8_pb_wo": (fp8_blocks, "fp8_per_block"), "MXFP8": (mxfp8, "mxfp8"), "NVFP4": (nvfp4, "nvfp4"),
}  # fmt: skip


def write_modelopt(
    folder: Path, encode: Encode, quantization: Mapping[str, object], **model: object
) -> tuple[Path, Path]:
    """With the configuration in the file that ModelOpt puts beside config.json."""
    tiny = TinyModel(layers=1, **model)  # type: ignore[arg-type]
    coded, twin = write_coded(folder, encode, config={}, model=tiny)
    raw = json.loads((coded / "config.json").read_text(encoding="utf-8"))
    del raw["quantization_config"]
    (coded / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    side = {"producer": {"name": "modelopt", "version": "0.37"}, "quantization": quantization}
    (coded / "hf_quant_config.json").write_text(json.dumps(side), encoding="utf-8")
    return coded, twin


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_logits_are_those_of_the_numbers_that_the_codes_stand_for(tmp_path: Path, algorithm: str, family: str) -> None:
    encode, scheme = ALGORITHMS[algorithm]
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    coded, twin = write_modelopt(tmp_path, encode, quantization, family=family, hidden_size=64)
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=1e-5, atol=1e-5)
    params = [param for spec in prepare(str(coded), LoadOptions()).specs for param in spec.params]
    assert {param.scheme.name for param in params if "proj" in param.name} == {scheme}


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_a_flat_configuration_in_config_json_is_read_too(tmp_path: Path, algorithm: str) -> None:
    config = {
        "quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], "config_groups": {},
        "producer": {"name": "modelopt"}, "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    }  # fmt: skip

    def encode(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, wide = ALGORITHMS[algorithm][0](module, weight)
        cache_scales = {"k_proj": {"k_scale": torch.ones(())}, "v_proj": {"v_scale": torch.ones(())}}
        return tensors | cache_scales.get(module.rpartition(".")[2], {}), wide

    coded, twin = write_coded(tmp_path, encode, config=config, model=TinyModel(layers=1))
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=1e-5, atol=1e-5)


def test_nvfp4_is_kept_to_the_bit(tmp_path: Path) -> None:
    coded, twin = write_modelopt(tmp_path, nvfp4, {"quant_algo": "NVFP4", "group_size": 16}, hidden_size=72)
    on_disk, wide = load_file(coded / "model.safetensors"), load_file(twin / "model.safetensors")
    stems = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]
    params = {param.name: param for spec in prepare(str(coded), LoadOptions()).specs for param in spec.params}
    fused = params["model.layers.0.mlp.gate_up_proj.weight"]
    with LLM(str(coded)) as llm:
        llm.wait_loaded()
        kept = dict(llm.shell.named_parameters()) | dict(llm.shell.named_buffers())
        stored = {leaf: kept[f"model.layers.0.mlp.gate_up_proj.{leaf}"].detach().clone() for leaf in fused.storage()}
    assert same_bits(stored["weight"], torch.cat([on_disk[stem] for stem in stems]))
    assert same_bits(stored["weight_global_scale"], torch.stack([on_disk[f"{stem}_scale_2"] for stem in stems]))
    found = fused.scheme.dequantize(stored, fused.kept_rows, dtype=torch.float32)
    assert same_bits(found, torch.cat([wide[stem] for stem in stems]))


def test_modules_of_several_kinds(tmp_path: Path) -> None:
    def encode(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        kind = {"o_proj": fp8, "down_proj": nvfp4, "q_proj": None}.get(module.rpartition(".")[2], fp8_blocks)
        return None if kind is None else kind(module, weight)

    stem = "model.layers.0.self_attn"
    layers = {f"{stem}.o_proj": "FP8", "model.layers.0.mlp.down_proj": "NVFP4"}
    for module in (f"{stem}.k_proj", f"{stem}.v_proj", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"):
        layers[module] = "FP8_PB_WO"
    quantization = {
        "quant_algo": "MIXED_PRECISION", "quantized_layers": {name: {"quant_algo": one} for name, one in layers.items()}
    }  # fmt: skip
    coded, twin = write_modelopt(tmp_path, encode, quantization)
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_verify_finds_the_streamed_model_equal_to_the_resident_one(
    tmp_path: Path, algorithm: str, capfd: pytest.CaptureFixture[str]
) -> None:
    coded, _ = write_modelopt(tmp_path, ALGORITHMS[algorithm][0], {"quant_algo": algorithm})
    assert cli.run(["verify", str(coded)]) == 0, capfd.readouterr().err
    assert "equal to the bit" in capfd.readouterr().out


def test_nvfp4_is_not_quantized_another_way(tmp_path: Path) -> None:
    coded, _ = write_modelopt(tmp_path, nvfp4, {"quant_algo": "NVFP4"})
    with pytest.raises(CheckpointError, match=r"already quantized on disk \(NVFP4\): leave --quantization out"):
        prepare(str(coded), LoadOptions(quantization="int8_per_channel"))


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_algo": "W4A16_AWQ"}, "quant_algo 'W4A16_AWQ': FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO"),
        ({}, "quant_algo 'None'"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size 32: the groups of NVFP4 have 16 numbers"),
        ({"quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION with 0 quantized_layers"),
        ({"quant_algo": "FP8", "quantized_layers": [1]}, "quantized_layers: an object for each"),
        ({"quant_algo": "FP8", "exclude_modules": "lm_head"}, "exclude_modules 'lm_head': a list of names"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_one_clear_line(
    tmp_path: Path, quantization: Mapping[str, object], words: str
) -> None:
    coded, _ = write_modelopt(tmp_path, fp8, quantization)
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: the checkpoint is already quantized") as raised:
        prepare(str(coded), LoadOptions())
    assert words in str(raised.value)


def test_all_faults_that_headers_show_come_in_one_report(tmp_path: Path) -> None:
    def encode(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, wide = nvfp4(module, weight)
        if "gate" in module:
            tensors["weight_scale"] = tensors["weight_scale"][:, :1]
        if "q_proj" in module:
            del tensors["weight_scale_2"]
        if "o_proj" in module:
            tensors["pre_quant_scale"] = torch.ones(weight.shape[1])
        return tensors, wide

    coded, _ = write_modelopt(tmp_path, encode, {"quant_algo": "NVFP4"})
    with pytest.raises(CheckpointError) as raised:
        prepare(str(coded), LoadOptions())
    message = str(raised.value)
    assert "gate_proj.weight_scale in model.safetensors: shape [96, 1], but NVFP4 makes it [96, 4]" in message
    assert "q_proj: its weight is NVFP4, but it has no weight_scale_2" in message
    assert "o_proj: its inputs are scaled by pre_quant_scale" in message

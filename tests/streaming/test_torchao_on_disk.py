"""torchao's safetensors files: by a literal reading of the layout, and as the library itself writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel
from streaming import LLM, LoadOptions, cli
from streaming.errors import CheckpointError, LayerLoadError, OptionError
from streaming.prepare import prepare
from tests.streaming.coded import Tensors, logits_of, write_coded

IDS = [5, 9, 7, 21]
CONFIG = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FOUR_BIT_FLOATS = torch.tensor(E2M1 + [-one for one in E2M1])
Coded = tuple[str, dict[str, Any], Tensors, torch.Tensor]  # class, attributes, parts, the wide weight
Encode = Callable[[torch.Tensor], Coded]


def dtype_words(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


def int8(weight: torch.Tensor) -> Coded:
    scale = weight.float().abs().amax(1, keepdim=True) / 127
    codes = (weight.float() / scale).round().to(torch.int8)
    parts = {"qdata": codes, "scale": scale, "zero_point": torch.zeros(scale.shape, dtype=torch.int8)}
    return "Int8Tensor", {"block_size": [1, weight.shape[1]], "act_quant_kwargs": None}, parts, codes.float() * scale


def intx(bits: int, group: int | None) -> Encode:
    def encode(weight: torch.Tensor) -> Coded:
        rows, columns = weight.shape
        size = group or columns
        least, most = -(1 << bits - 1), (1 << bits - 1) - 1
        codes = torch.randint(least, most + 1, (rows, columns), dtype=torch.int8)
        scale = torch.rand(rows, columns // size).add_(0.1).mul_(0.1 / most).bfloat16()
        zero = torch.randint(least, most + 1, scale.shape, dtype=torch.int8)
        steps = codes.float() - zero.float().repeat_interleave(size, 1)
        data = {"target_dtype": dtype_words(f"int{bits}"), "block_size": [1, size], "dtype": dtype_words("bfloat16")}
        parts = {"qdata": codes, "scale": scale, "zero_point": zero}
        return "IntxUnpackedToInt8Tensor", data, parts, steps * scale.float().repeat_interleave(size, 1)

    return encode


def float8(block: tuple[int, int] | None) -> Encode:
    """`block` None: the whole weight; (1, 0): whole rows."""

    def encode(weight: torch.Tensor) -> Coded:
        rows, columns = weight.shape
        height, width = block or (rows, columns)
        width = width or columns
        grid = torch.rand(-(-rows // height), -(-columns // width)).add_(0.5).mul_(0.003)
        scale = grid.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
        codes = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        parts = {"qdata": codes, "scale": grid}
        return "Float8Tensor", {"block_size": [height, width]}, parts, codes.float() * scale

    return encode


def mx(element: str) -> Encode:
    def encode(weight: torch.Tensor) -> Coded:
        exponents = torch.randint(118, 124, (weight.shape[0], weight.shape[1] // 32), dtype=torch.uint8)
        scale = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
        data = {"elem_dtype": dtype_words(element), "block_size": 32, "is_swizzled_scales": False}
        if element == "float8_e4m3fn":
            codes = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            wide = codes.float()
        else:
            nibbles = torch.randint(0, 16, tuple(weight.shape), dtype=torch.uint8)
            codes, wide = nibbles[:, 0::2] | nibbles[:, 1::2] << 4, FOUR_BIT_FLOATS[nibbles.long()]
        return "MXTensor", data, {"qdata": codes, "scale": exponents.view(torch.float8_e8m0fnu)}, wide * scale

    return encode


def nvfp4(whole: bool) -> Encode:
    def encode(weight: torch.Tensor) -> Coded:
        nibbles = torch.randint(0, 16, tuple(weight.shape), dtype=torch.uint8)
        scale = torch.rand(weight.shape[0], weight.shape[1] // 16).add_(0.2).mul_(0.06).to(torch.float8_e4m3fn)
        parts = {"qdata": nibbles[:, 0::2] | nibbles[:, 1::2] << 4, "scale": scale}
        wide = FOUR_BIT_FLOATS[nibbles.long()] * scale.float().repeat_interleave(16, 1)
        if whole:
            parts["per_tensor_scale"] = torch.rand(()) + 0.5
            wide = wide * parts["per_tensor_scale"]
        return "NVFP4Tensor", {"block_size": 16, "is_swizzled_scales": False}, parts, wide

    return encode


FORMS: dict[str, tuple[Encode, str]] = {
    "int8": (int8, "int8_per_channel"), "int4 groups": (intx(4, 32), "int4_per_group:asym"),
    "int2 groups": (intx(2, 16), "int4_per_group:16:asym"), "int8 groups": (intx(8, None), "int8_per_group:row:asym"),
    "float8 rows": (float8((1, 0)), "fp8_per_channel"), "float8 tensor": (float8(None), "fp8_per_tensor"),
    "float8 blocks": (float8((32, 32)), "fp8_per_block_32x32"), "mxfp8": (mx("float8_e4m3fn"), "mxfp8"),
    "mxfp4": (mx("float4_e2m1fn_x2"), "mxfp4"), "nvfp4": (nvfp4(True), "nvfp4"),
    "nvfp4 without a scale for all": (nvfp4(False), "nvfp4"),
}  # fmt: skip


def write_torchao(folder: Path, encode: Encode, *, change: dict[str, Any] | None = None) -> tuple[Path, Path]:
    """`change`: of the attributes of every weight."""
    described: dict[str, str] = {}

    def parts_of(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        kind, data, parts, wide = encode(weight)
        described[f"{module}.weight"] = json.dumps(
            {"_type": kind, "_data": data, "_tensor_data_names": list(parts)} | (change or {})
        )
        return {f"_weight_{name}": part for name, part in parts.items()}, wide

    coded, twin = write_coded(folder, parts_of, config=CONFIG, model=TinyModel(layers=1))
    describe(coded, described)
    return coded, twin


def describe(coded: Path, described: dict[str, str]) -> None:
    tensors = load_file(coded / "model.safetensors")
    plain = {name: json.dumps({"_type": "Tensor"}) for name in tensors if "._weight_" not in name}
    names = json.dumps([*described, *plain])
    save_file(tensors, coded / "model.safetensors", metadata={**described, **plain, "tensor_names": names})


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_numbers_that_the_codes_stand_for(tmp_path: Path, form: str) -> None:
    encode, scheme = FORMS[form]
    coded, twin = write_torchao(tmp_path, encode)
    torch.testing.assert_close(logits_of(coded, IDS), logits_of(twin, IDS), rtol=1e-5, atol=1e-5)
    prepared = prepare(str(coded), LoadOptions())
    assert {p.scheme.name for spec in prepared.specs for p in spec.params if "proj" in p.name} == {scheme}
    assert (prepared.reading.strategy, prepared.reading.reason) == (
        "torchao", "the checkpoint is serialized by torchao",
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_what_is_kept_stands_for_the_same_numbers_to_the_bit(tmp_path: Path, form: str) -> None:
    coded, twin = write_torchao(tmp_path, FORMS[form][0])
    wide, module = load_file(twin / "model.safetensors"), "model.layers.0.mlp.gate_up_proj"
    params = {p.name: p for spec in prepare(str(coded), LoadOptions()).specs for p in spec.params}
    param = params[f"{module}.weight"]
    with LLM(str(coded)) as llm:
        llm.wait_loaded()
        kept = dict(llm.shell.named_parameters()) | dict(llm.shell.named_buffers())
        stored = {leaf: kept[f"{module}.{leaf}"].detach().clone() for leaf in param.storage()}
    found = param.scheme.dequantize(stored, param.kept_rows, dtype=torch.float32, in_features=param.shape[1])
    assert torch.equal(found, torch.cat([wide[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")]))


@pytest.mark.parametrize("form", ["int4 groups", "nvfp4 without a scale for all"])
def test_verify_finds_the_streamed_model_equal_to_the_resident_one(
    tmp_path: Path, form: str, capfd: pytest.CaptureFixture[str]
) -> None:
    coded, _ = write_torchao(tmp_path, FORMS[form][0])
    assert cli.run(["verify", str(coded)]) == 0, capfd.readouterr().err
    assert "equal to the bit" in capfd.readouterr().out


def test_another_strategy_may_be_asked_for(tmp_path: Path) -> None:
    coded, twin = write_torchao(tmp_path, int8)
    for strategy in ("torchao", "lazy"):
        found = logits_of(coded, IDS, safetensors_load_strategy=strategy)
        torch.testing.assert_close(found, logits_of(twin, IDS), rtol=1e-5, atol=1e-5)
    with pytest.raises(OptionError, match="is not serialized by torchao"):
        prepare(str(twin), LoadOptions(safetensors_load_strategy="torchao"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"_type": "Int4TilePackedTo4dTensor"}, "its weight is a torchao Int4TilePackedTo4dTensor: Int8Tensor, Intx"),
        ({"_data": {"block_size": [2, 64]}}, r"scales for blocks of \[2, 64\]; rows or the whole weight"),
        ({"_data": {"block_size": "row"}}, "block_size row: two numbers are needed"),
        ({"_data": {"block_size": [1, 64], "is_swizzled_scales": True}}, "the scales of its Int8Tensor are swizzled"),
        ({"_data": 1}, "its weight is a torchao Int8Tensor"),
    ],
)
def test_what_cannot_be_read_is_told_of_every_weight(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    coded, _ = write_torchao(tmp_path, int8, change=change)
    with pytest.raises(CheckpointError, match=words) as raised:
        prepare(str(coded), LoadOptions())
    assert "7 problems in the checkpoint" in str(raised.value)


def test_headers_without_descriptions_are_one_clear_line(tmp_path: Path) -> None:
    coded, _ = write_torchao(tmp_path, int8)
    save_file(load_file(coded / "model.safetensors"), coded / "model.safetensors")
    with pytest.raises(CheckpointError, match="the metadata of its safetensors headers has no tensor_names"):
        prepare(str(coded), LoadOptions())


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 100_000, '"x"'])
def test_descriptions_that_are_no_objects_are_one_clear_line(tmp_path: Path, text: str) -> None:
    coded, _ = write_torchao(tmp_path, int8)
    with safe_open(coded / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    metadata["model.layers.0.mlp.up_proj.weight"] = text
    save_file(load_file(coded / "model.safetensors"), coded / "model.safetensors", metadata=metadata)
    with pytest.raises(CheckpointError, match="the metadata of its header says"):
        prepare(str(coded), LoadOptions())


@pytest.mark.parametrize(
    ("encode", "part", "words"),
    [(int8, "zero_point", "zero points that are not 0"), (intx(4, 32), "qdata", "at most 4 bits, and have more")],
)
def test_numbers_that_contradict_the_class_are_found_while_loading(
    tmp_path: Path, encode: Encode, part: str, words: str
) -> None:
    def changed(weight: torch.Tensor) -> Coded:
        kind, data, parts, wide = encode(weight)
        parts[part][0, 0] = 100
        return kind, data, parts, wide

    coded, _ = write_torchao(tmp_path, changed)
    with pytest.raises(LayerLoadError, match=words), LLM(str(coded)) as llm:
        llm.wait_loaded()


def test_all_faults_that_headers_show_come_in_one_report(tmp_path: Path) -> None:
    coded, _ = write_torchao(tmp_path, int8)
    with safe_open(coded / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(coded / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj._weight_scale"]
    tensors["model.layers.0.mlp.gate_proj._weight_scale"] = torch.ones(3, 1)
    del metadata["model.layers.0.mlp.down_proj.weight"]
    save_file(tensors, coded / "model.safetensors", metadata=metadata)
    with pytest.raises(CheckpointError) as raised:
        prepare(str(coded), LoadOptions())
    message = str(raised.value)
    assert "up_proj: its weight is a torchao Int8Tensor, but it has no _weight_scale" in message
    assert "gate_proj._weight_scale in model.safetensors: shape [3, 1], but torchao Int8Tensor makes it" in message
    assert "down_proj: its weight is a torchao None" in message


def written_by_the_library(kind: str, weight: torch.Tensor) -> Any:
    quantization = pytest.importorskip("torchao.quantization")
    if kind in ("mxfp8", "mxfp4"):
        formats = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
        element = torch.float8_e4m3fn if kind == "mxfp8" else torch.float4_e2m1fn_x2
        return formats.MXTensor.to_mx(weight, element, 32)
    if kind == "nvfp4":
        formats = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
        whole = formats.per_tensor_amax_to_scale(weight.abs().amax())
        return formats.NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=whole)
    groups = quantization.PerGroup(32)
    configuration = {
        "int8": lambda: quantization.Int8WeightOnlyConfig(version=2),
        "float8": lambda: quantization.Float8WeightOnlyConfig(version=2),
        "int4": lambda: quantization.IntxWeightOnlyConfig(weight_dtype=vars(torch)["int4"], granularity=groups),
        "int3 asymmetric": lambda: quantization.IntxWeightOnlyConfig(
            weight_dtype=vars(torch)["int3"], granularity=groups, mapping_type=quantization.MappingType.ASYMMETRIC
        ),
    }[kind]()
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight.data.copy_(weight)
    quantization.quantize_(linear, configuration)
    return linear.weight.detach()


@pytest.mark.parametrize("kind", ["int8", "float8", "int4", "int3 asymmetric", "mxfp8", "mxfp4", "nvfp4"])
def test_files_that_the_library_writes_hold_the_numbers_that_it_finds_in_them(tmp_path: Path, kind: str) -> None:
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    described: dict[str, str] = {}

    def encode(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        made = written_by_the_library(kind, weight.bfloat16())
        flat, metadata = support.flatten_tensor_state_dict({f"{module}.weight": made})
        described[f"{module}.weight"] = metadata[f"{module}.weight"]
        wide = made.dequantize(torch.float32) if kind in ("mxfp8", "mxfp4", "nvfp4") else made.dequantize()
        return {name.removeprefix(f"{module}."): part for name, part in flat.items()}, wide

    coded, twin = write_coded(tmp_path, encode, config=CONFIG, model=TinyModel(layers=1))
    describe(coded, described)
    wide = load_file(twin / "model.safetensors")
    params = [p for spec in prepare(str(coded), LoadOptions()).specs for p in spec.params]
    (param,) = (p for p in params if p.name == "model.layers.0.mlp.down_proj.weight")
    with LLM(str(coded)) as llm:
        llm.wait_loaded()
        kept = dict(llm.shell.named_parameters()) | dict(llm.shell.named_buffers())
        stored = {leaf: kept[f"model.layers.0.mlp.down_proj.{leaf}"].detach().clone() for leaf in param.storage()}
    found = param.scheme.dequantize(stored, param.kept_rows, dtype=torch.float32, in_features=param.shape[1])
    # The library rounds to bfloat16 where its tensors are of it; nvfp4's three factors it multiplies in another order.
    near = {"int8": 4e-3, "float8": 4e-3, "int4": 4e-3, "int3 asymmetric": 4e-3, "nvfp4": 1e-6}.get(kind, 0.0)
    torch.testing.assert_close(found, wide[param.name].float(), rtol=near, atol=0.0)

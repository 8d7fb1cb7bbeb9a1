"""`quantize`: transformers and compressed-tensors read its folder, to the bit; nothing half is taken for whole."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import struct
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples.write_tiny_model import TinyModel
from layers.weights import ParamKind, ParamSpec, Section
from quant.dtypes import DType
from quant.registry import scheme_by_name, scheme_names
from streaming import cli
from streaming.llm import LLM
from streaming.one_layer import load_one_layer
from streaming.options import LoadOptions
from streaming.prepare import prepare
from streaming.quantized_folder import quantization_config
from streaming.quantized_modules import Module
from tests.streaming.resident import resident_model, same_bits

IDS = [3, 1, 4, 1, 5, 9]
Folders = Callable[[TinyModel], Path]
SCHEMES = [
    name
    for name in (
        "fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int8_per_channel", "int4_per_group",
        "int4_per_group:32:asym", "mxfp8", "mxfp4",
    )
    if name.partition(":")[0] in scheme_names()
]  # fmt: skip
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def quantize(model: Path, out: Path, scheme: str, *options: str) -> int:
    return cli.run(["quantize", str(model), str(out), "--quantization", scheme, "--quiet", *options])


def error_of(capfd: pytest.CaptureFixture[str], *arguments: object, status: int) -> str:
    """The one line of a command that fails with this status."""
    capfd.readouterr()
    assert cli.run(["quantize", *map(str, arguments)]) == status
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def load_with_transformers(folder: Path, *, dequantize: bool) -> Any:
    """The model as transformers reads it, by way of compressed-tensors; nothing missing, nothing too much."""
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if dequantize else {}
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **config)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model


def logits_of(model: Any) -> torch.Tensor:
    """float32 [tokens, vocabulary]."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: torch.Tensor = model(torch.tensor([IDS])).logits[0].float()
    return found


def dequantized(folder: Path, scheme: str, dtype: str) -> dict[str, torch.Tensor]:
    """What the resident model's stored weights stand for, by the checkpoint's own names."""
    model, how = resident_model(folder, quantization=scheme, dtype=dtype), scheme_by_name(scheme)
    found: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        stored = dict(module.named_parameters(recurse=False))
        if "weight_scale" not in stored:
            continue
        parent, _, last = name.rpartition(".")
        rows = getattr(module, "sections")  # noqa: B009
        wide = how.dequantize(stored, rows, dtype=getattr(torch, dtype))
        for part, weight in zip(PARTS.get(last, (last,)), wide.split(list(rows)), strict=True):
            found[f"{parent}.{part}.weight"] = weight
    return found


# --- what is in it


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_reads_the_very_weights_that_the_stored_form_stands_for(
    tiny_folder: Folders, tmp_path: Path, scheme: str, dtype: str
) -> None:
    folder = tiny_folder(TinyModel(layers=1, dtype=dtype))
    assert quantize(folder, tmp_path / "out", scheme) == 0
    model = load_with_transformers(tmp_path / "out", dequantize=True)
    weights = model.state_dict()
    expected = dequantized(folder, scheme, dtype)
    assert len(expected) == 7
    for name, weight in expected.items():
        assert same_bits(weights[name], weight), name
    wide = {name: tensor for name, tensor in tensors_of(folder).items() if name not in expected}
    assert all(same_bits(weights[name], tensor) for name, tensor in wide.items())
    if dtype == "float32":
        with LLM(folder, quantization=scheme) as llm:
            assert torch.allclose(logits_of(model), llm.logits(IDS), atol=1e-4)


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if "asym" not in scheme])
def test_transformers_reads_it_in_its_compressed_form_too(tiny_folder: Folders, tmp_path: Path, scheme: str) -> None:
    """In the dtype that the scales of its shell can take. Not with zero points: compressed-tensors 0.20 does not pack
    them when it lays out its own shell, so that theirs have another shape than those of any file."""
    dtype = "float32" if "8_per" in scheme else "bfloat16"
    assert quantize(tiny_folder(TinyModel(layers=1, dtype=dtype)), tmp_path / "out", scheme) == 0
    dense, packed = (load_with_transformers(tmp_path / "out", dequantize=one) for one in (True, False))
    assert same_bits(logits_of(packed), logits_of(dense))


@pytest.mark.skipif("nvfp4" not in scheme_names(), reason="no such scheme")
def test_the_global_scale_of_nvfp4_divides(tiny_folder: Folders, tmp_path: Path) -> None:
    folder = tiny_folder(TinyModel(layers=1))
    assert quantize(folder, tmp_path / "out", "nvfp4") == 0
    found = tensors_of(tmp_path / "out")
    layer = load_one_layer(prepare(str(folder), LoadOptions(quantization="nvfp4")), 0)
    qkv = "model.layers.0.self_attn.qkv_proj"
    for index, (part, rows) in enumerate((("q_proj", (0, 64)), ("k_proj", (64, 96)), ("v_proj", (96, 128)))):
        module = f"model.layers.0.self_attn.{part}"
        assert same_bits(found[f"{module}.weight_packed"], layer[f"{qkv}.weight"][slice(*rows)])
        assert same_bits(found[f"{module}.weight_scale"], layer[f"{qkv}.weight_scale"][slice(*rows)])
        (scale,) = found[f"{module}.weight_global_scale"].tolist()
        kept = layer[f"{qkv}.weight_global_scale"][index].item()
        assert scale == pytest.approx(1 / kept, rel=2**-24, abs=0)
    weights = load_with_transformers(tmp_path / "out", dequantize=True).state_dict()
    for name, weight in dequantized(folder, "nvfp4", "bfloat16").items():
        torch.testing.assert_close(weights[name], weight, rtol=2**-8, atol=0)  # the next bfloat16 at the most


@pytest.mark.parametrize(
    "family",
    ["phi3", "gemma2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen2", "qwen3", "olmo2", "granite"))],
)
def test_the_folder_has_the_names_of_the_familys_checkpoints(tiny_folder: Folders, tmp_path: Path, family: str) -> None:
    folder = tiny_folder(TinyModel(layers=1, family=family, tied=family == "gemma2"))
    assert quantize(folder, tmp_path / "out", "fp8_per_channel") == 0
    source, found = tensors_of(folder), tensors_of(tmp_path / "out")
    scaled = {name for name in source if found[name].dtype == torch.float8_e4m3fn}
    assert {name.split(".")[-2] for name in scaled} == {
        name.split(".")[-2] for name in source if "proj" in name.split(".")[-2]
    }
    assert found.keys() == source.keys() | {f"{name}_scale" for name in scaled}
    assert all(found[f"{name}_scale"].shape == (source[name].shape[0], 1) for name in scaled)
    assert all(same_bits(found[name], source[name]) for name in source.keys() - scaled)
    load_with_transformers(tmp_path / "out", dequantize=True)


def test_asymmetric_codes_and_zero_points_are_packed_into_words(tiny_folder: Folders, tmp_path: Path) -> None:
    """Read back by hand: eight codes a word, the first one lowest; zero points eight rows a word."""
    folder = tiny_folder(TinyModel())
    assert quantize(folder, tmp_path / "out", "int4_per_group:32:asym") == 0
    found = tensors_of(tmp_path / "out")
    layer = load_one_layer(prepare(str(folder), LoadOptions(quantization="int4_per_group:32:asym")), 0)
    module = "model.layers.0.mlp.down_proj"
    packed, zeros = found[f"{module}.weight_packed"], found[f"{module}.weight_zero_point"]
    assert found[f"{module}.weight_shape"].tolist() == [64, 96]
    assert (packed.shape, zeros.shape, packed.dtype, zeros.dtype) == ((64, 12), (8, 3), torch.int32, torch.int32)
    stored = layer[f"{module}.weight"]
    for row, column in ((0, 0), (0, 1), (5, 31), (63, 95), (17, 50)):
        (word,) = struct.unpack("<I", struct.pack("<i", int(packed[row, column // 8])))
        nibble = int(stored[row, column // 2]) >> (4 * (column % 2)) & 15
        assert word >> (4 * (column % 8)) & 15 == nibble
    for row, group in ((0, 0), (7, 1), (8, 2), (63, 0)):
        (word,) = struct.unpack("<I", struct.pack("<i", int(zeros[row // 8, group])))
        assert word >> (4 * (row % 8)) & 15 == int(layer[f"{module}.weight_zero_point"][row, group])


def test_zero_points_of_one_group_a_row_are_packed_into_words(tiny_folder: Folders, tmp_path: Path) -> None:
    folder = tiny_folder(TinyModel(layers=1, intermediate_size=64))
    assert quantize(folder, tmp_path / "out", "int4_per_group:64:asym") == 0
    found = tensors_of(tmp_path / "out")
    layer = load_one_layer(prepare(str(folder), LoadOptions(quantization="int4_per_group:64:asym")), 0)
    module = "model.layers.0.mlp.down_proj"
    zeros, stored = found[f"{module}.weight_zero_point"], layer[f"{module}.weight_zero_point"]
    assert (zeros.shape, stored.shape) == ((8, 1), (64, 1))
    for row in range(64):
        (word,) = struct.unpack("<I", struct.pack("<i", int(zeros[row // 8, 0])))
        assert word >> (4 * (row % 8)) & 15 == int(stored[row, 0])


def test_config_says_what_is_quantized_and_how(tiny_folder: Folders, tmp_path: Path) -> None:
    folder = tiny_folder(TinyModel())
    assert quantize(folder, tmp_path / "out", "fp8_per_block") == 0
    config = config_of(tmp_path / "out")
    quantized = config.pop("quantization_config")
    assert config == config_of(folder)
    assert (quantized["quant_method"], quantized["format"]) == ("compressed-tensors", "float-quantized")
    group = quantized["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"]
    assert group["weights"]["block_structure"] == [128, 128]
    assert quantized["ignore"] == ["lm_head"]


def test_two_schemes_are_two_groups_that_name_their_modules() -> None:
    schemes = {"a.q_proj": "fp8_per_channel", "a.o_proj": "int4_per_group:64:asym", "b.q_proj": "fp8_per_channel"}
    modules = [linear_module(name, scheme) for name, scheme in {**schemes, "a.gate": "none"}.items()]
    found = quantization_config(modules)
    groups = list(found["config_groups"].values())
    assert found["format"] == "mixed-precision"
    assert [group["targets"] for group in groups] == [["a.q_proj", "b.q_proj"], ["a.o_proj"]]
    assert [group["format"] for group in groups] == ["float-quantized", "pack-quantized"]
    expected = {
        "num_bits": 4,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": 64,
        "dynamic": False,
    }
    assert groups[1]["weights"] == expected
    assert found["ignore"] == ["a.gate", "lm_head"]


def linear_module(name: str, scheme: str) -> Module:
    spec = ParamSpec(
        f"{name}.weight", (128, 64), (Section("", 128),), ParamKind.LINEAR, DType.BF16, scheme_by_name(scheme)
    )
    return Module(name, "weight", spec, 0, 1)


@pytest.mark.parametrize("tied", [False, True])
def test_a_quantized_head_is_a_matrix_of_its_own(tiny_folder: Folders, tmp_path: Path, tied: bool) -> None:
    folder = tiny_folder(TinyModel(layers=1, tied=tied, dtype="float32"))
    assert quantize(folder, tmp_path / "out", "int8_per_channel", "--quantize-head") == 0
    config = config_of(tmp_path / "out")
    assert config["quantization_config"]["ignore"] == []
    assert config["tie_word_embeddings"] is False
    found = tensors_of(tmp_path / "out")
    assert found["lm_head.weight"].dtype == torch.int8
    assert same_bits(found["model.embed_tokens.weight"], tensors_of(folder)["model.embed_tokens.weight"])
    with LLM(folder, quantization="int8_per_channel", quantize_head=True) as llm:
        model = load_with_transformers(tmp_path / "out", dequantize=True)
        assert torch.allclose(logits_of(model), llm.logits(IDS), atol=1e-4)


def test_files_are_no_larger_than_asked_and_the_index_names_them(four_layers: Path, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert quantize(four_layers, whole, "fp8_per_channel") == 0
    assert quantize(four_layers, cut, "fp8_per_channel", "--max-shard-size", "40KB") == 0
    assert not (whole / "model.safetensors.index.json").exists()
    index = json.loads((cut / "model.safetensors.index.json").read_text())
    files = sorted(cut.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    expected = tensors_of(whole)
    for file in files:
        held = load_file(file)
        assert sum(tensor.nbytes for tensor in held.values()) <= 40_000
        assert {index["weight_map"][name] for name in held} == {file.name}
        assert all(same_bits(tensor, expected[name]) for name, tensor in held.items())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())


def test_tokenizer_and_template_files_come_along(four_layers: Path, tmp_path: Path) -> None:
    model = shutil.copytree(four_layers, tmp_path / "model")
    texts = {"tokenizer.json": "{}", "chat_template.jinja": "{{ messages }}", "generation_config.json": '{"eos": 1}'}
    for name, text in {**texts, "notes.txt": "no"}.items():
        (model / name).write_text(text)
    assert quantize(model, tmp_path / "out", "fp8_per_tensor") == 0
    assert {name: (tmp_path / "out" / name).read_text() for name in texts} == texts
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        [*texts, "config.json", "model.safetensors"]
    )


def test_names_that_a_wrapper_changed_are_written_as_the_family_has_them(four_layers: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(four_layers / "config.json", model)
    source = tensors_of(four_layers)
    save_file({f"module.{name}": tensor for name, tensor in source.items()}, model / "model.safetensors")
    assert quantize(model, tmp_path / "out", "fp8_per_channel", "--unwrap-names") == 0
    assert {name for name in tensors_of(tmp_path / "out") if not name.endswith("_scale")} == source.keys()


def test_parts_that_a_llama_file_has_fused_are_written_apart(four_layers: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(four_layers / "config.json", model)
    source = tensors_of(four_layers)
    fused = dict(source)
    for index in range(4):
        for target, parts in PARTS.items():
            block = f"model.layers.{index}.{'self_attn' if target == 'qkv_proj' else 'mlp'}"
            fused[f"{block}.{target}.weight"] = torch.cat([fused.pop(f"{block}.{part}.weight") for part in parts])
    save_file(fused, model / "model.safetensors")
    for folder, out in ((four_layers, "apart"), (model, "fused")):
        assert quantize(folder, tmp_path / out, "fp8_per_tensor") == 0
    apart, found = tensors_of(tmp_path / "apart"), tensors_of(tmp_path / "fused")
    assert found.keys() == apart.keys()
    assert all(same_bits(found[name], apart[name]) for name in apart)


def test_json_says_what_was_written(four_layers: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert quantize(four_layers, out, "fp8_per_channel", "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert found["files"] == ["model.safetensors"]
    assert found["bytes_written"] == sum(tensor.nbytes for tensor in tensors_of(out).values())
    assert found["peak_bytes"] < prepare(str(four_layers), LoadOptions()).plan.kept_nbytes


# --- what is refused


def test_a_folder_that_holds_anything_is_refused_and_left_alone(
    four_layers: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("mine")
    found = error_of(capfd, four_layers, tmp_path, "--quantization", "fp8_per_channel", status=2)
    assert "is not empty (1 files, such as mine)" in found
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--quantization: which scheme is needed"),
        (
            ("--quantization", "int4_per_group:64"),
            "down_proj has 96 inputs, and int4_per_group:64 needs",
        ),
        (("--quantization", "fp8_per_tensor", "--max-shard-size", "many"), "--max-shard-size 'many': a size such as"),
        (("--quantization", "fp8_per_tensor", "--load-format", "dummy"), "its weights are made up"),
        (("--quantization", "mxfp4", "--kv-cache-dtype", "int8"), "--kv-cache-dtype int8: quantize writes weights"),
        (("--quantization", "mxfp4", "--activation-dtype", "int8"), "--activation-dtype int8: quantize writes"),
        (("--quantization", "mxfp4", "--kernels", "fast"), "--kernels fast: quantize writes weights"),
    ],
)
def test_what_cannot_be_written_is_one_line_and_no_folder(
    four_layers: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    assert words in error_of(capfd, four_layers, tmp_path / "out", *options, status=2)
    assert not (tmp_path / "out").exists()


def test_one_scale_does_not_do_for_a_fused_tensor(
    tiny_folder: Folders, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_folder(TinyModel(layers=1, family="phi3"))
    found = error_of(capfd, folder, tmp_path / "out", "--quantization", "fp8_per_tensor", status=2)
    assert "self_attn.qkv_proj is one tensor of 3 parts, and fp8_per_tensor has one scale" in found
    found = error_of(capfd, folder, tmp_path / "out", "--quantization", "fp8_per_block", status=2)
    assert "self_attn.qkv_proj is one tensor whose parts of [64, 32, 32] rows share blocks" in found


def test_what_is_quantized_is_not_quantized_again(
    four_layers: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first, shards, again = tmp_path / "first", tmp_path / "shards", tmp_path / "again"
    assert quantize(four_layers, first, "int8_per_channel") == 0
    assert cli.run(["save-shards", str(four_layers), "--out", str(shards), "--quiet"]) == 0
    for model in (first, shards):
        capfd.readouterr()
        assert quantize(model, again, "fp8_per_channel") in (1, 2)
        said = capfd.readouterr().err
        assert re.search("is already quantized on disk|shards were saved with none", said)
        assert not again.exists()


def test_the_memory_limit_counts_one_layer(
    four_layers: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ("--quantization", "fp8_per_channel", "--window", "64KiB", "--quiet")
    whole = prepare(str(four_layers), LoadOptions(quantization="fp8_per_channel")).plan.kept_nbytes
    assert cli.run(["quantize", str(four_layers), str(tmp_path / "a"), "--memory", str(whole), *options]) == 0
    found = error_of(capfd, four_layers, tmp_path / "b", "--memory", "20KiB", *options, status=1)
    assert "--memory 20.0 KiB is too small" in found
    assert not (tmp_path / "b").exists()


# --- what ends early


@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_is_one_line_and_nothing_stays(
    four_layers: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    out = tmp_path / "out"
    if there:
        out.mkdir()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    found = error_of(capfd, four_layers, out, "--quantization", "fp8_per_channel", "--quiet", status=1)
    assert f"OUT {out}: No space left on device; nothing was kept of it" in found
    assert list(out.iterdir()) == [] if there else not out.exists()


def test_a_disk_that_is_too_small_is_refused_before_anything_is_read(
    four_layers: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = os.statvfs_result((4096, 4096, 10, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: small)
    monkeypatch.setattr("streaming.one_layer.start_reader", None)
    found = error_of(capfd, four_layers, tmp_path / "out", "--quantization", "fp8_per_channel", status=1)
    assert "are needed, 0 B are free there" in found


def test_ctrl_c_leaves_no_folder(
    four_layers: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def load(prepared: Any, layer: str, **options: Any) -> Mapping[str, torch.Tensor]:
        loaded.append(layer)
        if len(loaded) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return load_one_layer(prepared, layer, **options)

    monkeypatch.setattr("streaming.one_layer.load_one_layer", load)
    out = tmp_path / "out"
    assert "interrupted" in error_of(capfd, four_layers, out, "--quantization", "fp8_per_channel", "--quiet", status=1)
    assert loaded == ["layers.0", "layers.1", "layers.2"]
    assert not out.exists()


def test_config_is_the_last_name_to_appear(four_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    appeared: list[str] = []
    rename = Path.rename

    def note(self: Path, target: Path) -> Path:
        appeared.append(Path(target).name)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", note)
    assert quantize(four_layers, tmp_path / "out", "fp8_per_channel", "--max-shard-size", "100KB") == 0
    assert appeared[-2:] == ["model.safetensors.index.json", "config.json"]
    assert len(appeared) == len(set(appeared)) == len(list((tmp_path / "out").iterdir()))

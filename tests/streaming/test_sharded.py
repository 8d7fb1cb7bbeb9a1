"""Shards: what save-shards writes is what a resident model keeps, and loads into the same model; nothing half is taken
for whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel, write_tiny_model
from quant.registry import scheme_names
from streaming import cli
from streaming.errors import CheckpointError, LayerLoadError, OptionError, StreamingError
from streaming.hooks import Hooks
from streaming.llm import LLM
from streaming.options import LoadOptions
from streaming.prepare import prepare
from streaming.sharded_writer import wanted_manifest, writing
from tests.layers.family_cases import FAMILY_CASES
from tests.streaming.coded import write_coded
from tests.streaming.resident import resident_model, run_resident, same_bits
from tests.streaming.test_gptq_and_awq import FORMS as GPTQ_FORMS
from tests.test_against_transformers import write_checkpoint

IDS = [3, 1, 4, 1, 5, 9]
PART = "model-rank-00000-part-00000.safetensors"
MANIFEST = "firstlayer_shards.json"
Folders = Callable[[TinyModel], Path]


def save(model: Path, out: Path, *options: str) -> int:
    return cli.run(["save-shards", str(model), "--out", str(out), "--quiet", "--reader", "threads", *options])


@pytest.fixture
def shards(four_layers: Path, tmp_path: Path) -> Path:
    """The four-layer model, saved in fp8_per_channel."""
    out = tmp_path / "shards"
    assert save(four_layers, out, "--quantization", "fp8_per_channel") == 0
    return out


def change_manifest(folder: Path, **changes: Any) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def error_of(capfd: pytest.CaptureFixture[str], *arguments: object, status: int = 1) -> str:
    """The one line of a command that fails with this status."""
    capfd.readouterr()
    assert cli.run([str(argument) for argument in arguments]) == status
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", scheme_names())
def test_shards_hold_what_a_resident_model_keeps_and_give_its_logits(
    tiny_folder: Folders, tmp_path: Path, quantization: str, tied: bool
) -> None:
    folder = tiny_folder(TinyModel(tied=tied))
    model = resident_model(folder, quantization=quantization)
    assert save(folder, tmp_path, "--quantization", quantization) == 0
    kept = dict(model.named_parameters())
    written = load_file(tmp_path / PART)
    assert written.keys() == kept.keys()
    assert all(same_bits(written[name], kept[name]) for name in kept)
    with LLM(tmp_path) as llm:
        logits = llm.logits(IDS)
        llm.wait_loaded()
        assert same_bits(logits, run_resident(model, IDS).logits)
        assert same_bits(llm.logits(IDS), logits)
        assert llm.stats().quantize_s == 0


@pytest.mark.parametrize("tied", [False, True])
def test_a_quantized_head_is_saved_beside_the_wide_table(tiny_folder: Folders, tmp_path: Path, tied: bool) -> None:
    folder, options = tiny_folder(TinyModel(tied=tied)), ["--quantization", "int8_per_channel", "--quantize-head"]
    assert save(folder, tmp_path, *options) == 0
    with LLM(folder, quantization="int8_per_channel", quantize_head=True) as llm:
        expected = llm.logits(IDS)
    with LLM(tmp_path) as llm:
        assert same_bits(llm.logits(IDS), expected)
    written = load_file(tmp_path / PART)
    assert written["lm_head.weight"].dtype is torch.int8
    assert written["model.embed_tokens.weight"].dtype is torch.bfloat16


def test_every_stored_byte_is_read_once_and_straight_to_its_place(shards: Path, four_layers: Path) -> None:
    prepared = prepare(str(shards), LoadOptions())
    assert all(item.direct for item in prepared.plan.items)
    assert prepared.read_plan.window_nbytes == 0
    assert prepared.plan.read_nbytes == prepared.plan.kept_nbytes
    assert prepared.plan.read_nbytes < prepare(str(four_layers), LoadOptions()).plan.read_nbytes
    taken = sorted((piece.file_offset, piece.file_offset + piece.nbytes) for piece in prepared.read_plan.pieces)
    assert taken[-1][1] == (shards / PART).stat().st_size
    assert all(before[1] == after[0] for before, after in pairwise(taken))


def test_small_files_come_along(tiny_folder: Folders, tmp_path: Path) -> None:
    source, out = tmp_path / "model", tmp_path / "out"
    source.mkdir()
    for file in tiny_folder(TinyModel()).iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    (source / "generation_config.json").write_text('{"eos_token_id": 7}')
    (source / "tokenizer_config.json").write_text("{}")
    assert save(source, out) == 0
    assert sorted(os.listdir(out)) == sorted(
        ["config.json", "generation_config.json", "tokenizer_config.json", MANIFEST, PART]
    )
    assert (out / "generation_config.json").read_text() == '{"eos_token_id": 7}'
    assert json.loads((out / "config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_verify_agrees_and_sees_a_changed_byte(shards: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify", str(shards), "--quiet"]) == 0
    with (shards / PART).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    capfd.readouterr()
    assert cli.run(["verify", str(shards), "--quiet"]) == 1
    assert f"{PART}: its sha256 is " in capfd.readouterr().out


# --- what is not one scheme for all


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def scaled(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """fp8 with a scale for each tensor; those of q, k and v differ."""
    scale = torch.tensor(0.004 * (1 + len(module) % 5))
    codes = (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def check_same(model: Path, out: Path, *, straight: bool = True, **options: Any) -> Any:
    """The shards hold the very tensors, and give the very logits, of the model itself; what was planned of them."""
    with LLM(model, **options) as llm:
        logits = llm.logits(IDS)
        llm.wait_loaded()
        stored = {name: tensor.clone() for name, tensor in llm.shell.named_parameters()}
    with LLM(out) as llm:
        assert same_bits(llm.logits(IDS), logits)
        llm.wait_loaded()
        found = dict(llm.shell.named_parameters())
        assert found.keys() == stored.keys()
        assert all(same_bits(found[name], stored[name]) for name in stored)
        assert llm.stats().quantize_s == 0
    prepared = prepare(str(out), LoadOptions())
    assert all(item.direct for item in prepared.plan.items) is straight
    assert prepared.plan.read_nbytes == prepared.plan.kept_nbytes
    assert cli.run(["verify", str(out), "--quiet"]) == 0
    return prepared


@pytest.mark.parametrize("family", ["llama", "phi3"])  # phi3's q, k and v have one scale on disk
def test_what_is_quantized_on_disk_is_saved_as_it_is_kept(tmp_path: Path, family: str) -> None:
    coded, _ = write_coded(tmp_path, scaled, config=FP8, model=TinyModel(layers=2, family=family))
    assert save(coded, tmp_path / "out") == 0
    prepared = check_same(coded, tmp_path / "out")
    weight = next(p for p in prepared.specs[1].params if p.name.endswith("qkv_proj.weight"))
    assert weight.scheme.name == "fp8_per_tensor"
    assert weight.storage()["weight_scale"].shape == ((1,) if family == "phi3" else (3,))


def test_an_order_of_inputs_is_saved_and_looked_at_when_it_is_loaded(tmp_path: Path) -> None:
    """Each input's group is a number that products believe."""
    encode, config = GPTQ_FORMS["gptq_ordered"]
    coded, _ = write_coded(tmp_path, encode, config=config, model=TinyModel(layers=2))
    out = tmp_path / "out"
    assert save(coded, out) == 0
    check_same(coded, out, straight=False)
    tensors = load_file(out / PART)
    tensors["model.layers.1.mlp.down_proj.g_idx"][0, 5] = 3
    save_file(tensors, out / PART)
    size = (out / PART).stat().st_size
    change_manifest(out, files=[json.loads((out / MANIFEST).read_text())["files"][0] | {"nbytes": size}])
    wrong = r"layer layers.1, stage quantize.*down_proj.g_idx.*g_idx names groups 0 to 3, but there are 3"
    with LLM(out) as llm, pytest.raises(LayerLoadError, match=wrong):
        llm.logits(IDS)


def test_experts_are_saved_as_they_are_kept(moe_folder: Path, tmp_path: Path) -> None:
    assert save(moe_folder, tmp_path / "out") == 0
    prepared = check_same(moe_folder, tmp_path / "out")
    schemes = {p.name: p.scheme.name for spec in prepared.specs for p in spec.params}
    assert schemes["model.layers.0.mlp.experts.gate_up_proj.weight"] == "fp8_per_tensor"


@pytest.fixture
def moe_folder(tmp_path: Path) -> Path:
    """A tiny Qwen3 with experts, all linear weights of the layers in fp8."""
    folder = tmp_path / "moe"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model_type, changes = FAMILY_CASES["qwen3_moe"]
        write_checkpoint(import_module("transformers"), model_type, {**changes, "vocab_size": 160}, folder=folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module, _, leaf = name.rpartition(".")
        made = scaled(module, tensor)[0] if "proj" in module and leaf == "weight" else {leaf: tensor.bfloat16()}
        tensors |= {f"{module}.{leaf}": part for leaf, part in made.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16", "quantization_config": FP8}))
    return folder


def test_what_is_quantized_anew_is_saved_as_it_came_out(tmp_path: Path) -> None:
    coded, _ = write_coded(tmp_path, scaled, config=FP8)
    assert save(coded, tmp_path / "out", "--quantization", "mxfp4") == 0
    check_same(coded, tmp_path / "out", quantization="mxfp4")


def test_weights_of_several_schemes_and_percentiles_are_saved_with_each_ones_own(
    four_layers: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = {
        "default": "int4_per_group:64:asym", "ignore": ["model.layers.1.mlp"],
        "rules": [
            {"match": "self_attn", "scheme": "fp8_per_tensor", "percentile": 99.0},
            {"match": "lm_head", "scheme": "nvfp4"},
        ],
    }  # fmt: skip
    out = tmp_path / "out"
    assert save(four_layers, out, "--quantization-config", json.dumps(config)) == 0
    specs = check_same(four_layers, out, quantization_config=config).specs
    kept = {param.name: param.scheme.name for spec in specs for param in spec.params}
    assert kept["lm_head.weight"] == "nvfp4"
    assert kept["model.layers.1.mlp.down_proj.weight"] == "none"
    assert kept["model.layers.0.mlp.down_proj.weight"] == "int4_per_group:64:asym"
    assert kept["model.layers.0.self_attn.qkv_proj.weight"] == "fp8_per_tensor"
    words = "the shards were saved with fp8_per_tensor and int4_per_group:64:asym and nvfp4; leave the option out"
    assert words in error_of(capfd, "plan", out, "--quantization", "int4_per_group:64:asym", status=2)
    found = error_of(capfd, "plan", out, "--quantization-config", '{"default": "mxfp8"}', status=2)
    assert "--quantization-config: the shards are read as they were saved" in found


@pytest.mark.parametrize("asked", ["int4_per_group", "int4_per_group:32"])
def test_two_names_of_one_scheme_are_the_same(
    four_layers: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], asked: str
) -> None:
    assert save(four_layers, tmp_path, "--quantization", "int4_per_group:32") == 0
    assert cli.run(["plan", str(tmp_path), "--quantization", asked]) == 0
    capfd.readouterr()
    assert cli.run(["save-shards", str(four_layers), "--out", str(tmp_path), "--quantization", asked]) == 0
    assert "holds the same already" in capfd.readouterr().out
    found = error_of(capfd, "plan", tmp_path, "--quantization", "int4_per_group:64", status=2)
    assert "--quantization int4_per_group:64: the shards were saved with int4_per_group;" in found


def test_the_scales_of_an_fp8_cache_come_along(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "model", model=TinyModel(layers=2, files=1))
    tensors = load_file(model / "model.safetensors")
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.k_proj.k_scale"] = torch.tensor(0.01 + 0.1 * layer)
        tensors[f"model.layers.{layer}.self_attn.v_proj.v_scale"] = torch.tensor(0.02)
    save_file(tensors, model / "model.safetensors")
    out = tmp_path / "out"
    cache: Any = {"kv_cache_dtype": "fp8"}
    assert save(model, out) == 0
    direct, saved = (prepare(str(folder), LoadOptions(**cache)) for folder in (model, out))
    assert direct.kv_scales is not None
    assert saved.kv_scales == direct.kv_scales
    assert saved.warnings == ()
    with LLM(model, **cache) as llm:
        expected = llm.logits(IDS)
    with LLM(out, **cache) as llm:
        assert same_bits(llm.logits(IDS), expected)
    with LLM(out) as llm:
        assert not same_bits(llm.logits(IDS), expected)  # nor would scales of 1 give them
    change_manifest(out, kv_scales=[[1.0, 1.0]])
    assert "kv_scales are of 1 layers; the model has 2" in error_of(capfd, "plan", out, "--kv-cache-dtype", "fp8")


def test_a_model_without_cache_scales_has_none_in_its_shards(shards: Path) -> None:
    prepared = prepare(str(shards), LoadOptions(kv_cache_dtype="fp8"))
    assert (prepared.kv_scales, prepared.warnings) == (None, ())


# --- what is refused


def test_another_scheme_or_dtype_is_refused_with_both(shards: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = error_of(capfd, "plan", shards, "--quantization", "fp8_per_block", status=2)
    assert "--quantization fp8_per_block: the shards were saved with fp8_per_channel" in found
    found = error_of(capfd, "plan", shards, "--dtype", "float32", status=2)
    assert "--dtype float32: the shards were saved in bfloat16" in found
    for options in ([], ["--quantization", "fp8_per_channel"], ["--load-format", "sharded_state"]):
        assert cli.run(["plan", str(shards), *options]) == 0


def test_another_topology_is_refused_with_both_numbers(shards: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = error_of(capfd, "plan", shards, "--tensor-parallel-size", "2", "--expert-parallel-size", "4")
    assert "saved for tensor parallel size 1 and expert parallel size 1" in found
    assert "this run has tensor parallel size 2 and expert parallel size 4" in found


def test_a_folder_without_its_manifest_is_not_taken_for_whole(shards: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (shards / MANIFEST).unlink()
    for options in ([], ["--load-format", "sharded_state"]):
        assert "save-shards did not come to its end here" in error_of(capfd, "plan", shards, *options)


def test_a_folder_that_is_no_shards_is_refused(four_layers: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert MANIFEST in error_of(capfd, "plan", four_layers, "--load-format", "sharded_state")


def test_a_file_of_another_size_is_refused(shards: Path, capfd: pytest.CaptureFixture[str]) -> None:
    size = (shards / PART).stat().st_size
    os.truncate(shards / PART, size - 8)
    assert f"{PART}: has {size - 8} bytes, but {MANIFEST} says {size}" in error_of(capfd, "plan", shards)


def test_all_tensors_that_are_wrong_are_in_one_report(shards: Path) -> None:
    tensors = load_file(shards / PART)
    del tensors["model.layers.1.mlp.down_proj.weight_scale"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    tensors["extra.weight"] = torch.zeros(2)
    save_file(tensors, shards / PART)
    files = json.loads((shards / MANIFEST).read_text())["files"]
    change_manifest(shards, files=[files[0] | {"nbytes": (shards / PART).stat().st_size}])
    with pytest.raises(Exception, match="3 problems") as caught:
        prepare(str(shards), LoadOptions())
    assert "model.layers.1.mlp.down_proj.weight_scale is missing" in str(caught.value)
    assert "model.norm.weight in model-rank-00000-part-00000.safetensors: F32 [64], but the model keeps BF16 [64]" in (
        str(caught.value)
    )
    assert "extra.weight" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 1}, "version 1; this program reads 2 and 3: save it again"),
        ({"tied": 1}, "tied is 1"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size is True"),
        ({"quantization": "fp3"}, "'fp3'"),
        ({"dtype": "int8"}, "'int8'"),
        ({"files": [{"name": "../x.safetensors", "nbytes": 1, "sha256": ""}]}, "../x.safetensors"),
        ({"files": [{"name": PART}]}, "an entry that is none"),
        ({"weights": []}, "weights is []"),
        ({"weights": {"a.weight": 1}}, "a.weight is '1'"),
        ({"weights": {"a.weight": {"scheme": {"class": "Popen"}, "runs": []}}}, "a.weight: a scheme is"),
        ({"weights": {"lm_head.weight": {"scheme": {"class": "MxFp4"}, "runs": [0]}}}, "lm_head.weight: runs is '[0]'"),
        ({"weights": {"lm_head.weight": {"scheme": {"class": "MxFp4"}, "runs": [2]}}}, "runs is [2] of 1 sections"),
        ({"weights": {"a.weight": {"scheme": {"class": "MxFp4"}, "runs": []}}}, "'a.weight', which the model has not"),
        ({"weights": {"model.norm.weight": {"scheme": {"class": "MxFp4"}, "runs": []}}}, "'model.norm.weight', which"),
        (
            {"weights": {"lm_head.weight": {"scheme": {"class": "Nf4", "numbers": "nf4", "block": 48}, "runs": []}}},
            "1 rows of 64 are not whole blocks of 48",
        ),
        ({"kv_scales": [[1.0, 0.0]]}, "kv_scales is [[1.0, 0.0]]"),
        ({"kv_scales": [[1.0, True]]}, "kv_scales is [[1.0, True]]"),
    ],
)
def test_a_manifest_that_is_wrong_is_named(
    shards: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, Any], words: str
) -> None:
    change_manifest(shards, **changes)
    found = error_of(capfd, "plan", shards)
    assert MANIFEST in found
    assert words in found


# --- writing


def test_a_folder_that_holds_the_same_is_left_alone_and_any_other_is_refused(
    shards: Path, four_layers: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file.name: file.stat().st_mtime_ns for file in shards.iterdir()}
    with monkeypatch.context() as patched:
        patched.setattr("streaming.one_layer.start_reader", None)  # nothing is loaded
        assert save(four_layers, shards, "--quantization", "fp8_per_channel") == 0
        found = error_of(capfd, "save-shards", four_layers, "--out", shards, "--quantization", "none", status=2)
    assert "is not empty (3 files, such as config.json) and does not hold the same" in found
    assert {file.name: file.stat().st_mtime_ns for file in shards.iterdir()} == before
    (shards / PART).unlink()
    error_of(capfd, "save-shards", four_layers, "--out", shards, "--quantization", "fp8_per_channel", status=2)


@pytest.mark.parametrize("there", [False, True], ids=["new folder", "empty folder"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    four_layers: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    out = tmp_path / "out"
    if there:
        out.mkdir()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    found = error_of(capfd, "save-shards", four_layers, "--out", out, "--quiet")
    assert found.endswith(f"--out {out}: No space left on device; nothing was kept of it")
    assert out.exists() is there
    assert not there or not list(out.iterdir())


def test_a_disk_without_room_is_refused_before_anything_is_read(
    four_layers: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    monkeypatch.setattr("streaming.one_layer.start_reader", None)
    assert "are needed, 0 B are free there" in error_of(capfd, "save-shards", four_layers, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_layer_that_cannot_be_loaded_leaves_nothing(
    tiny_folder: Folders, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("broken on purpose")

    monkeypatch.setattr("streaming.item_storing.store_item", fail)
    out = tmp_path / "out"
    options = ["--quantization", "fp8_per_tensor", "--quiet"]
    found = error_of(capfd, "save-shards", tiny_folder(TinyModel()), "--out", out, *options)
    assert "layer layers.0, stage quantize" in found
    assert not out.exists()


def test_what_a_crash_leaves_is_refused_wherever_it_comes(
    four_layers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, states, rename = tmp_path / "out", list[tuple[str, Path]](), Path.rename

    def keep_state(self: Path, target: Path) -> Path:
        left = tmp_path / f"before {target.name}"
        states.append((target.name, shutil.copytree(self.parent, left)))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", keep_state)
    assert save(four_layers, out) == 0
    assert [name for name, _ in states] == [PART, "config.json", MANIFEST]
    for _, left in states:
        with pytest.raises(CheckpointError):
            prepare(str(left), LoadOptions())
    assert prepare(str(out), LoadOptions()).checkpoint.format == "sharded_state"


@pytest.mark.parametrize("name", [PART, "config.json", MANIFEST])
def test_an_interrupt_leaves_nothing_wherever_it_comes(
    four_layers: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    out, rename = tmp_path / "out", Path.rename

    def interrupt(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        if target.name == name:
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(Path, "rename", interrupt)
    assert "interrupted" in error_of(capfd, "save-shards", four_layers, "--out", out, "--quiet")
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"unwrap_names": True}, "--unwrap-names: the shards have the model's own names"),
        (
            {"model_loader_extra_config": {"enable_weights_track": False}},
            "enable_weights_track false: the shards are whole or refused",
        ),
    ],
)
def test_options_that_would_be_ignored_are_refused(shards: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        prepare(str(shards), LoadOptions(**options))


def test_what_another_process_writes_is_left_alone(four_layers: Path, tmp_path: Path) -> None:
    """Two that save into one empty folder: the second is refused, and takes nothing of the first one's away."""
    ranks, out = (prepare(str(four_layers), LoadOptions()),), tmp_path / "out"
    other = out / f"{PART}.partial"

    def save_beside() -> None:
        with writing(ranks, out, wanted_manifest(ranks), hooks=Hooks()) as writer:
            other.write_bytes(b"of another process")
            writer.write()

    with pytest.raises(StreamingError, match="File exists"):
        save_beside()
    assert other.read_bytes() == b"of another process"


def test_inspect_says_what_is_there_as_stored(shards: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["inspect", str(shards), "--layer", "2"]) == 0
    lines = capfd.readouterr().out.splitlines()
    place = lines.index(
        "  model.layers.2.self_attn.qkv_proj.weight [fp8_per_channel] weight F8_E4M3 [128, 64], weight_scale F32 [128]"
    )
    fed = "    <- model.layers.2.self_attn.qkv_proj"
    assert lines[place + 1].startswith(f"{fed}.weight_scale F32 [128] as stored weight_scale ({PART} at byte ")
    assert lines[place + 2].startswith(f"{fed}.weight F8_E4M3 [128, 64] as stored weight ({PART} at byte ")


@pytest.mark.parametrize("strategy", ["lazy", "eager", "prefetch", "direct"])
def test_every_strategy_reads_them(shards: Path, four_layers: Path, strategy: str) -> None:
    expected = run_resident(resident_model(four_layers, quantization="fp8_per_channel"), IDS).logits
    with LLM(shards, safetensors_load_strategy=strategy) as llm:
        assert same_bits(llm.logits(IDS), expected)

"""Shards: what save-shards writes is what a resident model keeps, and loads into the same model; nothing half is taken
for whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel
from quant.registry import scheme_names
from streaming import cli
from streaming.errors import CheckpointError, OptionError, StreamingError
from streaming.llm import LLM
from streaming.options import LoadOptions
from streaming.prepare import prepare
from streaming.sharded_writer import wanted_manifest, writing
from tests.streaming.resident import resident_model, run_resident, same_bits

IDS = [3, 1, 4, 1, 5, 9]
PART = "model-rank-00000-part-00000.safetensors"
MANIFEST = "firstlayer_shards.json"
Folders = Callable[[TinyModel], Path]


def save(model: Path, out: Path, *options: str) -> int:
    return cli.run(["save-shards", str(model), "--out", str(out), "--quiet", *options])


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


# --- what is refused


def test_another_scheme_or_dtype_is_refused_with_both(shards: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = error_of(capfd, "plan", shards, "--quantization", "fp8_per_block", status=2)
    assert "--quantization fp8_per_block: the shards were saved with fp8_per_channel" in found
    found = error_of(capfd, "plan", shards, "--dtype", "float32", status=2)
    assert "--dtype float32: the shards were saved in bfloat16" in found
    for options in ([], ["--quantization", "fp8_per_channel"], ["--load-format", "sharded_state"]):
        assert cli.run(["plan", str(shards), *options]) == 0


def test_another_topology_is_refused_with_both_numbers(shards: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change_manifest(shards, tensor_parallel_size=4, expert_parallel_size=2)
    found = error_of(capfd, "plan", shards)
    assert "saved for tensor parallel size 4 and expert parallel size 2" in found
    assert "this run has tensor parallel size 1 and expert parallel size 1" in found


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
        ({"version": 2}, "version 2"),
        ({"tied": 1}, "tied is 1"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size is True"),
        ({"quantization": "fp3"}, "'fp3'"),
        ({"dtype": "int8"}, "'int8'"),
        ({"files": [{"name": "../x.safetensors", "nbytes": 1, "sha256": ""}]}, "../x.safetensors"),
        ({"files": [{"name": PART}]}, "an entry that is none"),
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
        patched.setattr("streaming.llm.start_reader", None)  # nothing is loaded
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
    monkeypatch.setattr("streaming.llm.start_reader", None)
    assert "are needed, 0 B are free there" in error_of(capfd, "save-shards", four_layers, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_layer_that_cannot_be_loaded_leaves_nothing(
    tiny_folder: Folders, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("broken on purpose")

    monkeypatch.setattr("streaming.pipeline.store_item", fail)
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
    prepared, out = prepare(str(four_layers), LoadOptions()), tmp_path / "out"
    other = out / f"{PART}.partial"

    def save_beside(llm: LLM) -> None:
        with writing(prepared, out, wanted_manifest(prepared)) as writer:
            other.write_bytes(b"of another process")
            llm.call(lambda runner, stop: writer.write(runner, stop=stop))

    with LLM.start(prepared) as llm, pytest.raises(StreamingError, match="File exists"):
        save_beside(llm)
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

"""What is fetched is what is read: the choice by names agrees with what opening a folder goes by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from streaming.checkpoint import LOAD_FORMATS, open_checkpoint
from streaming.checkpoint.hub import is_complete, read_repo_index
from streaming.checkpoint.wanted_files import parts_missing, small_files, weight_files
from streaming.errors import CheckpointError
from tests.streaming.checkpoint.build import INDEX, array, write_folder, write_gguf

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
LOCAL = tuple(name for name in LOAD_FORMATS if name in ("auto", "hf", "safetensors", "pt", "npcache", "gguf"))


def write_everything(root: Path, *, kinds: tuple[str, ...]) -> Path:
    """A folder with weights of several kinds, each whole by itself."""
    write_folder(root, {})
    if "parts" in kinds:
        index = {"x1": ONE, "x2": TWO}
        write_folder(
            root, {ONE: {"x1": array(2)}, TWO: {"x2": array(2)}, "model.safetensors": {"x": array(2)}}, index=index
        )
    if "single" in kinds:
        write_folder(root, {"model.safetensors": {"x": array(2)}, "consolidated.safetensors": {"y": array(2)}})
    if "bin" in kinds:
        torch.save({"x": torch.zeros(2)}, root / "pytorch_model.bin")
        torch.save({"x": torch.zeros(2)}, root / "training_args.bin")
    if "pt" in kinds:
        torch.save({"x": torch.zeros(2)}, root / "model.pt")
    if "gguf" in kinds:
        write_gguf(root / "model.gguf")
    return root


@pytest.mark.parametrize("load_format", LOCAL)
@pytest.mark.parametrize(
    "kinds",
    [
        ("single",),
        ("parts",),
        ("bin",),
        ("gguf",),
        ("single", "bin", "pt", "gguf"),
        ("bin", "pt", "gguf"),
        ("parts", "bin"),
    ],
    ids="+".join,
)
def test_the_files_chosen_are_those_that_opening_reads(
    tmp_path: Path, kinds: tuple[str, ...], load_format: str
) -> None:
    root = write_everything(tmp_path, kinds=kinds)
    names = [path.name for path in root.iterdir()]
    try:
        chosen = weight_files(names, load_format=load_format)
    except CheckpointError:
        with pytest.raises(CheckpointError, match="no weights"):
            open_checkpoint(root, load_format=load_format)
        assert not is_complete(root, load_format=load_format)
        return
    index = read_repo_index(root, chosen, names)
    chosen = weight_files(names, load_format=load_format, index=index)
    assert is_complete(root, load_format=load_format)
    if load_format == "npcache":  # it reads what it has written beside the files, which are these
        assert chosen == ["pytorch_model.bin"]
        return
    read = open_checkpoint(root, load_format=load_format)
    assert sorted(Path(str(file)).name for file in read.files) == chosen


def test_small_files_are_those_at_the_top() -> None:
    names = [
        "config.json",
        "sub/config.json",
        ".gitattributes",
        "tokenizer.model",
        "chat_template.jinja",
        "a.py",
        "x.bin",
    ]
    assert small_files(names) == ["chat_template.jinja", "config.json", "tokenizer.model"]


@pytest.mark.parametrize(
    ("names", "load_format", "expected"),
    [
        (["consolidated.safetensors", "params.json"], "auto", ["consolidated.safetensors"]),
        (["consolidated.safetensors", "params.json", "model.safetensors"], "auto", ["model.safetensors"]),
        (["consolidated.safetensors", "model.safetensors"], "mistral", ["consolidated.safetensors"]),
        (["consolidated.00.pth", "params.json", "model.safetensors"], "mistral", ["consolidated.00.pth"]),
        (["config.json", "model.safetensors"], "dummy", []),
        (["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"], "gguf",
         ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]),
        (["firstlayer_shards.json", "model-rank-00000-part-00001.safetensors", "model.safetensors"], "auto",
         ["model-rank-00000-part-00001.safetensors"]),
    ],
)  # fmt: skip
def test_each_format_has_its_own_files(names: list[str], load_format: str, expected: list[str]) -> None:
    assert weight_files(names, load_format=load_format) == expected


def test_a_part_that_claims_too_many_others_is_no_work() -> None:
    name = "m-000000001-of-999999999.gguf"
    with pytest.raises(CheckpointError, match="one of 999999999 parts, and there are 1 files in all"):
        weight_files([name], load_format="auto", file=name)
    assert parts_missing([name])
    assert not parts_missing([ONE, TWO])
    assert parts_missing([TWO])


def test_a_snapshot_without_what_its_index_names_is_not_whole(tmp_path: Path) -> None:
    root = write_everything(tmp_path, kinds=("parts",))
    assert is_complete(root)
    (root / TWO).unlink()
    assert not is_complete(root)
    (root / INDEX).write_text(json.dumps({"weight_map": {"x1": ONE}}))
    assert is_complete(root)
    (root / "config.json").unlink()
    assert not is_complete(root)

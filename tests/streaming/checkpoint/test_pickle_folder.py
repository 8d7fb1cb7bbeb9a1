"""Folders with PyTorch's own files: which of them are the model, and that none is read as what it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from streaming.checkpoint import open_checkpoint
from streaming.errors import CheckpointError, CheckpointFormatError
from tests.streaming.checkpoint.build import CONFIG, array, write_folder, write_gguf

BIN_INDEX, INDEX = "pytorch_model.bin.index.json", "model.safetensors.index.json"
A, B = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
STRAYS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth",
          "rng_state_0.pth", "adapter_model.bin")  # fmt: skip


def write(root: Path, *names: str, index: dict[str, Any] | None = None) -> Path:
    """A folder with these files; the tensor in each is called by the file's stem."""
    write_folder(root, {name: {Path(name).stem: array(2)} for name in names if name.endswith(".safetensors")})
    for name in names:
        if not name.endswith(".safetensors"):
            (root / name).parent.mkdir(exist_ok=True)
            torch.save({Path(name).stem: torch.ones(2)}, root / name)
    if index is not None:
        (root / BIN_INDEX).write_text(json.dumps({"weight_map": index}))
    return root


def read(root: Path, load_format: str = "auto") -> list[str]:
    return [file.name for file in open_checkpoint(root, load_format=load_format).files]


def refused(root: Path, load_format: str = "auto", kind: type[CheckpointError] = CheckpointError) -> tuple[str, ...]:
    with pytest.raises(kind) as caught:
        open_checkpoint(root, load_format=load_format)
    return caught.value.problems


@pytest.mark.parametrize("load_format", ["auto", "hf"])
def test_the_first_kind_that_is_there_is_the_model(load_format: str, tmp_path: Path) -> None:
    order = ["model.safetensors", "model.bin", "model.pt", "model.pth"]
    write(tmp_path, *order)
    write_gguf(tmp_path / "model.gguf")
    for name in order:
        assert read(tmp_path, load_format) == [name]
        (tmp_path / name).unlink()


def test_a_checkpoint_of_pickles_says_so(tmp_path: Path) -> None:
    found = open_checkpoint(write(tmp_path, "model.bin"))
    assert (found.format, found.root, found.config, found.notes) == ("pt", tmp_path, CONFIG, ())
    assert found.tensors["model"].shape == (2,)


def test_a_pt_folder_may_have_other_files_beside(tmp_path: Path) -> None:
    write(tmp_path, "model.safetensors", "model.bin", "one.pt", "two.pt")
    assert read(tmp_path, "pt") == ["one.pt", "two.pt"]
    assert read(tmp_path, "safetensors") == ["model.safetensors"]


@pytest.mark.parametrize(
    ("load_format", "words"),
    [
        ("safetensors", r"looked for *.safetensors; found only model.bin"),
        ("pt", r"looked for *.pt, *.pth; found only model.bin"),
        ("gguf", r"looked for *.gguf"),
    ],
)
def test_an_explicit_format_takes_no_other_files(load_format: str, words: str, tmp_path: Path) -> None:
    (problem,) = refused(write(tmp_path, "model.bin"), load_format)
    assert words in problem


@pytest.mark.parametrize("stray", STRAYS)
def test_strays_are_left_out(stray: str, tmp_path: Path) -> None:
    name = f"model{Path(stray).suffix}"
    assert read(write(tmp_path, name, stray)) == [name]
    (tmp_path / name).unlink()
    (problem,) = refused(tmp_path)
    assert f"looked for *.safetensors, *.bin, *.pt, *.pth; found only {stray}" in problem


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth"])
def test_a_single_file_is_a_model(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, "model.safetensors", name) / name
    found = open_checkpoint(path)
    assert (found.root, found.files, found.format, found.config) == (path, (path,), "pt", CONFIG)


@pytest.mark.parametrize(
    ("name", "load_format"),
    [("model.bin", "safetensors"), ("model.bin", "gguf"), ("model.bin", "pt"), ("model.safetensors", "pt"),
     ("model.pth", "npcache"), ("model.ckpt", "auto")],
)  # fmt: skip
def test_a_single_file_of_another_kind_is_not_opened(name: str, load_format: str, tmp_path: Path) -> None:
    (problem,) = refused(write(tmp_path, name) / name, load_format)
    assert "is not a file that format" in problem
    assert "its name should end in ." in problem


def test_one_file_of_several_points_to_the_folder(tmp_path: Path) -> None:
    (problem,) = refused(write(tmp_path, A, B) / B)
    assert f"is file 2 of 2; give the folder, {tmp_path}" in problem


def test_the_index_decides_which_files_are_read(tmp_path: Path) -> None:
    stems = {Path(name).stem: name for name in (A, B)}
    write(tmp_path, A, B, "stale.bin", index=stems)
    assert read(tmp_path) == [A, B]
    assert set(open_checkpoint(tmp_path).tensors) == set(stems)


def test_the_index_of_another_kind_is_of_no_meaning(tmp_path: Path) -> None:
    write(tmp_path, "model.bin")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "model.safetensors"}}))
    assert read(tmp_path) == ["model.bin"]
    (tmp_path / "model.bin").unlink()
    (problem,) = refused(tmp_path)
    assert f"model.safetensors: does not exist ({INDEX} names it)" in problem


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({}, "weight_map"),
        ({"x": 3}, "tensor 'x' is mapped to 3"),
        ({"x": "../outside.bin"}, "outside the model's folder"),
        ({"x": "/etc/passwd.bin"}, "outside the model's folder"),
        ({"x": "model.safetensors"}, "is not a .bin file"),
    ],
)
def test_each_fault_of_the_index_has_its_words(index: dict[str, Any], words: str, tmp_path: Path) -> None:
    (problem,) = refused(write(tmp_path, A, B, index=index), kind=CheckpointFormatError)
    assert BIN_INDEX in problem
    assert words in problem


def test_what_the_index_names_must_be_there(tmp_path: Path) -> None:
    stem = Path(A).stem
    write(tmp_path, A, index={stem: A, "y": B})
    (problem,) = refused(tmp_path)
    assert f"{B}: does not exist ({BIN_INDEX} names it)" in problem
    write(tmp_path, index={stem: A, "y": A})
    (problem,) = refused(tmp_path)
    assert f"places tensor 'y' in {A}, which does not hold it" in problem


def test_a_tensor_in_two_files_names_both(tmp_path: Path) -> None:
    write(tmp_path, "a.bin")
    torch.save({"a": torch.zeros(2)}, tmp_path / "b.bin")
    (problem,) = refused(tmp_path)
    assert "tensor 'a' is in" in problem
    assert "a.bin and " in problem
    assert f"b.bin, and no {BIN_INDEX} says which is meant" in problem
    (tmp_path / BIN_INDEX).write_text(json.dumps({"weight_map": {"a": "b.bin"}}))
    assert read(tmp_path) == ["b.bin"]


def test_a_gap_in_the_numbers_is_named(tmp_path: Path) -> None:
    (problem,) = refused(write(tmp_path, B))
    assert f"1 of 2 files missing: {A}" in problem


@pytest.mark.parametrize(
    ("named", "content", "words"),
    [
        ("model.bin", "model.safetensors", "is a safetensors file by its content"),
        ("model.safetensors", "model.bin", "is a zip archive, such as torch.save writes, by its content"),
        ("model.pt", "model.gguf", "is a GGUF file by its content"),
        ("model.safetensors", "model.gguf", "is a GGUF file by its content"),
    ],
)
def test_a_file_is_never_read_as_what_it_is_not(named: str, content: str, words: str, tmp_path: Path) -> None:
    write_folder(tmp_path, {})
    if content.endswith(".gguf"):
        write_gguf(tmp_path / content)
    else:
        write(tmp_path, content)
    (tmp_path / content).rename(tmp_path / named)
    (problem,) = refused(tmp_path, kind=CheckpointFormatError)
    assert f"{named}: {words}" in problem


def test_a_legacy_file_with_another_name_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, {})
    torch.save({"x": torch.ones(2)}, tmp_path / "model.safetensors", _use_new_zipfile_serialization=False)
    (problem,) = refused(tmp_path, kind=CheckpointFormatError)
    assert "model.safetensors: is a file of torch.save by its content, not a safetensors file" in problem


def test_all_problems_of_all_files_come_together(tmp_path: Path) -> None:
    write(tmp_path, A, B, index={"x": A, "y": B, "z": "gone.bin"})
    (tmp_path / "config.json").unlink()
    (tmp_path / A).write_bytes((tmp_path / A).read_bytes()[:-1])
    (tmp_path / B).write_text("version https://git-lfs.github.com/spec/v1\n")
    problems = refused(tmp_path, kind=CheckpointFormatError)
    words = ["config.json: is missing", "gone.bin: does not exist", "cut short", "git-lfs"]
    assert len(problems) == len(words)
    assert all(word in problem for word, problem in zip(words, problems, strict=True))

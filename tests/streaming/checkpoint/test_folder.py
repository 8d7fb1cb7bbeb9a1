"""A model folder: which files are read, where each tensor is taken from, and what is said when that cannot be."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streaming.checkpoint import open_checkpoint
from streaming.errors import CheckpointError, CheckpointFormatError
from tests.streaming.checkpoint.build import CONFIG, INDEX, array, safetensors_bytes, write_folder

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
X, Y = {"x": array(4, 2)}, {"y": array(3)}


def refused(root: Path, kind: type[CheckpointError] = CheckpointError, **options: Any) -> tuple[str, ...]:
    with pytest.raises(kind) as caught:
        open_checkpoint(root, **options)
    return caught.value.problems


def names(root: Path) -> list[str]:
    return [file.name for file in open_checkpoint(root).files]


def test_one_file_and_its_config(tmp_path: Path) -> None:
    found = open_checkpoint(write_folder(tmp_path, {"model.safetensors": {**X, **Y}}))
    assert found.format == "safetensors"
    assert found.root == tmp_path
    assert found.config == CONFIG
    assert {name: info.shape for name, info in found.tensors.items()} == {"x": (4, 2), "y": (3,)}
    assert found.nbytes == 4 * (8 + 3)
    assert (found.metadata, found.notes) == ({}, ())


def test_a_single_file_takes_the_config_beside_it(tmp_path: Path) -> None:
    path = write_folder(tmp_path, {"model.safetensors": X}) / "model.safetensors"
    found = open_checkpoint(path)
    assert (found.root, found.files, found.config) == (path, (path,), CONFIG)


@pytest.mark.parametrize("name", ["with space", "größe%20模型#1", "a[b]*?", "%s%d {x}"])
def test_any_folder_name_will_do(name: str, tmp_path: Path) -> None:
    root = write_folder(tmp_path / name, {"model.safetensors": X})
    assert set(open_checkpoint(str(root)).tensors) == {"x"}


def test_the_index_decides_which_files_are_read(tmp_path: Path) -> None:
    stale = {"x": array(9, 9)}
    root = write_folder(tmp_path, {A: X, B: Y, "model.safetensors": stale, "consolidated.safetensors": stale},
                        index={"x": A, "y": B})  # fmt: skip
    assert names(root) == [A, B]
    assert open_checkpoint(root).tensors["x"].shape == (4, 2)


def test_without_an_index_all_files_are_read(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {A: X, B: Y})
    assert set(open_checkpoint(root).tensors) == {"x", "y"}


def test_files_in_subfolders_of_an_index(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"parts/one.safetensors": X}, index={"x": "./parts/one.safetensors"})
    assert open_checkpoint(root).files == (root / "parts/one.safetensors",)


@pytest.mark.parametrize(
    "stray",
    ["adapter_model.safetensors", "optimizer.safetensors", "consolidated.safetensors", "._model.safetensors"],
)
def test_strays_are_left_out(stray: str, tmp_path: Path) -> None:
    assert names(write_folder(tmp_path, {"model.safetensors": X, stray: Y})) == ["model.safetensors"]


def test_safetensors_come_before_pickles(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"model.safetensors": X})
    (root / "pytorch_model.bin").write_bytes(b"never opened")
    assert names(root) == ["model.safetensors"]


def test_a_misplaced_tensor_is_found_where_it_is_with_a_note(tmp_path: Path) -> None:
    tensors = {A: {**X, "w": array(2)}, B: Y}
    found = open_checkpoint(write_folder(tmp_path, tensors, index={"w": A, "x": B, "y": B}))
    assert found.tensors["x"].file.name == A
    assert found.notes == (f"{INDEX} places 'x' in {B}; it was found, and is read, in {A}",)


def test_the_index_decides_between_duplicates(tmp_path: Path) -> None:
    files = {A: X, B: {**Y, "x": array(4, 2, seed=1)}}
    files[A] = {**X, "w": array(2)}
    root = write_folder(tmp_path, files, index={"w": A, "x": B, "y": B})
    assert open_checkpoint(root).tensors["x"].file.name == B


def test_duplicates_without_an_index_name_both_files(tmp_path: Path) -> None:
    (problem,) = refused(write_folder(tmp_path, {"model.safetensors": X, "model.fp16.safetensors": X}))
    assert "tensor 'x' is in" in problem
    assert "model.safetensors" in problem
    assert "model.fp16.safetensors" in problem


def test_missing_files_of_an_index_are_each_named(tmp_path: Path) -> None:
    third = "model-00003-of-00003.safetensors"
    problems = refused(write_folder(tmp_path, {A: X}, index={"x": A, "y": B, "z": third}))
    assert [Path(problem.split(":")[0]).name for problem in problems] == [B, third]
    assert all(f"does not exist ({INDEX} names it)" in problem for problem in problems)


def test_a_tensor_that_no_file_holds_is_named(tmp_path: Path) -> None:
    (problem,) = refused(write_folder(tmp_path, {A: X, B: Y}, index={"x": A, "y": B, "gone": B}))
    assert f"places tensor 'gone' in {B}, which does not hold it" in problem


@pytest.mark.parametrize(
    ("present", "words"),
    [
        ((1, 3), "1 of 3 files missing: model-00002-of-00003.safetensors"),
        ((2,), "2 of 3 files missing: model-00001-of-00003.safetensors, model-00003-of-00003.safetensors"),
    ],
)
def test_a_gap_in_the_numbers_is_named(present: tuple[int, ...], words: str, tmp_path: Path) -> None:
    files = {f"model-{number:05}-of-00003.safetensors": {f"t{number}": array(2)} for number in present}
    (problem,) = refused(write_folder(tmp_path, files))
    assert words in problem


def test_a_gap_of_many_files_is_shortened(tmp_path: Path) -> None:
    (problem,) = refused(write_folder(tmp_path, {"model-00001-of-99999.safetensors": X}))
    assert "99998 of 99999 files missing" in problem
    assert "and 99993 more" in problem
    assert len(problem) < 500


def test_one_file_of_several_points_to_the_folder(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {A: X, B: Y})
    (problem,) = refused(root / A)
    assert f"is file 1 of 2; give the folder, {root}" in problem


def test_all_problems_of_all_files_come_together(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {A: X}, index={"x": A, "y": B, "z": "z.safetensors"}, config=None)
    content = (root / A).read_bytes()
    (root / A).write_bytes(content[:-3])
    (root / B).write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointFormatError, match=r"^4 problems in ") as caught:
        open_checkpoint(root)
    assert [re.search("is missing|does not exist|cut short|git-lfs", line)[0] for line in caught.value.problems] == [  # type: ignore[index]
        "is missing", "does not exist", "cut short", "git-lfs",
    ]  # fmt: skip


def test_a_broken_index_does_not_hide_broken_files(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {A: X})
    (root / INDEX).write_text("{")
    (root / A).write_bytes(b"x" * 50)
    problems = refused(root, CheckpointFormatError)
    assert len(problems) == 2
    assert "is not valid JSON" in problems[0]
    assert "is not a safetensors file" in problems[1]


INDEXES: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "is not valid JSON"),
    "a list": ("[]", "holds a JSON list"),
    "no weight_map": ("{}", "weight_map"),
    "an empty weight_map": ('{"weight_map": {}}', "weight_map"),
    "a weight_map that is a list": ('{"weight_map": ["a"]}', "weight_map"),
    "a file that is a number": ('{"weight_map": {"x": 3}}', "tensor 'x' is mapped to 3"),
    "a tensor twice": ('{"weight_map": {"x": "a.safetensors", "x": "b.safetensors"}}', "duplicate key 'x'"),
    "a parent folder": ('{"weight_map": {"x": "../outside/evil.safetensors"}}', "outside the model's folder"),
    "a parent inside": ('{"weight_map": {"x": "a/../../b.safetensors"}}', "outside the model's folder"),
    "an absolute path": ('{"weight_map": {"x": "/etc/a.safetensors"}}', "outside the model's folder"),
    "a zero byte": ('{"weight_map": {"x": "a\\u0000.safetensors"}}', "control characters"),
    "another kind of file": ('{"weight_map": {"x": "pytorch_model.bin"}}', "is not a .safetensors file"),
    "the folder itself": ('{"weight_map": {"x": "."}}', "is not a .safetensors file"),
}


@pytest.mark.parametrize("fault", INDEXES)
def test_each_fault_of_an_index_has_its_words(fault: str, tmp_path: Path) -> None:
    text, words = INDEXES[fault]
    root = write_folder(tmp_path, {})
    (root / INDEX).write_text(text)
    (problem,) = refused(root, CheckpointFormatError)
    assert words in problem
    assert INDEX in problem


def test_nothing_outside_the_folder_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_folder(tmp_path / "model", {A: X}, index={"x": "../evil.safetensors"})
    (tmp_path / "evil.safetensors").write_bytes(b"")
    opened: list[str] = []
    real = os.open

    def record(path: Any, *rest: Any) -> int:
        opened.append(str(path))
        return real(path, *rest)

    monkeypatch.setattr(os, "open", record)
    refused(root)
    assert opened
    assert not [path for path in opened if "evil" in path]


CONFIGS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda path: path.unlink(), "is missing"),
    "empty": (lambda path: path.write_text(""), "is empty"),
    "no JSON": (lambda path: path.write_text("{'a': 1}"), "is not valid JSON"),
    "a list": (lambda path: path.write_text("[1]"), "holds a JSON list, not an object"),
    "not UTF-8": (lambda path: path.write_bytes(b'{"a": "\xff"}'), "is not valid JSON"),
    "deep": (lambda path: path.write_text('{"a":' * 100_000), "is not valid JSON"),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_each_fault_of_a_config_has_its_words(fault: str, tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"model.safetensors": X})
    damage, words = CONFIGS[fault]
    damage(root / "config.json")
    (problem,) = refused(root)
    assert "config.json" in problem
    assert words in problem


def test_a_config_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"model.safetensors": X})
    (root / "config.json").write_text("\ufeff" + json.dumps(CONFIG))
    assert open_checkpoint(root).config == CONFIG


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ((), "no weights; looked for *.safetensors, *.bin, *.pt, *.pth"),
        (("training_args.bin", "optimizer.pt", "scaler.pt"), "found only optimizer.pt, scaler.pt, training_args.bin"),
        (("adapter_model.safetensors",), "found only adapter_model.safetensors"),
        (("training_args.bin",), "found only training_args.bin"),
        (("params.json",), "found params.json: Mistral's own layout"),
    ],
)
def test_a_folder_without_weights_says_what_was_looked_for(files: tuple[str, ...], words: str, tmp_path: Path) -> None:
    root = write_folder(tmp_path, {})
    for name in files:
        (root / name).write_bytes(b"x" * 64)
    (problem,) = refused(root)
    assert words in problem
    assert str(root) in problem


def test_a_file_without_tensors_is_no_model(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {})
    (root / "model.safetensors").write_bytes(safetensors_bytes({}))
    (problem,) = refused(root)
    assert "hold no tensors" in problem


def hub_snapshot(cache: Path) -> Path:
    """A model as the hub's client keeps it: the snapshot's files are links to blobs."""
    repo = cache / "models--acme--tiny"
    written = write_folder(cache / "written", {A: X, B: Y}, index={"x": A, "y": B})
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for file in written.iterdir():
        file.rename(repo / "blobs" / f"blob-of-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob-of-{file.name}")
    return snapshot


def test_a_snapshot_of_the_hub_is_read_through_its_links(tmp_path: Path) -> None:
    assert set(open_checkpoint(hub_snapshot(tmp_path)).tensors) == {"x", "y"}


def test_links_to_blobs_that_models_share_are_followed(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path)
    blob = (snapshot / A).resolve()
    (tmp_path / "blobs").mkdir()
    blob.rename(tmp_path / "blobs" / "shared")
    blob.symlink_to("../../blobs/shared")
    assert set(open_checkpoint(snapshot).tensors) == {"x", "y"}


def test_a_dangling_link_of_the_hub_is_named(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path)
    (snapshot / B).resolve().unlink()
    (problem,) = refused(snapshot)
    assert f"{B}: is a link to ../../blobs/blob-of-{B}, which does not exist" in problem


@pytest.mark.parametrize("name", [A, "config.json", INDEX])
def test_a_link_out_of_the_hub_is_refused(name: str, tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path / "cache")
    (snapshot / name).resolve().rename(tmp_path / "elsewhere")
    (snapshot / name).unlink()
    (snapshot / name).symlink_to(tmp_path / "elsewhere")
    problems = refused(snapshot)
    assert f"{name}: is a link out of the hub's cache" in problems[0]


def test_a_users_own_links_are_followed(tmp_path: Path) -> None:
    store = write_folder(tmp_path / "store", {"model.safetensors": X})
    root = tmp_path / "model"
    root.mkdir()
    for name in ("model.safetensors", "config.json"):
        (root / name).symlink_to(store / name)
    assert set(open_checkpoint(root).tensors) == {"x"}

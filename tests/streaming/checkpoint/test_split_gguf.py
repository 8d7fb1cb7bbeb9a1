"""Parts of a split GGUF model that do not belong together: each ends in words that name the part."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streaming.checkpoint import open_checkpoint
from streaming.cli import run as run_command
from streaming.errors import CheckpointError
from tests.streaming.checkpoint.build import LLAMA_KEYS, llama_tensors, write_gguf

FIRST, SECOND = "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"
Change = Callable[[Path], object]


def write_part(path: Path, number: int, *, count: Any = 2, names: slice | None = None, **keys: Any) -> Path:
    """Part `number`, from 0, of the tiny llama; its tensors are every second one, or those of `names`."""
    tensors = list(llama_tensors().items())
    chosen = tensors[number::2] if names is None else tensors[names]
    own = {"split.no": number, "split.count": count, "split.tensors.count": len(tensors)}
    return write_gguf(path, keys={**(LLAMA_KEYS if number == 0 else {}), **own, **keys}, tensors=dict(chosen))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model of two parts."""
    write_part(tmp_path / FIRST, 0)
    write_part(tmp_path / SECOND, 1)
    return tmp_path


def other_model(folder: Path) -> None:
    """The second part of a model of another architecture, with as many tensors."""
    tensors = dict(list(llama_tensors().items())[1::2])
    keys = {"split.no": 1, "split.count": 2, "split.tensors.count": 11}
    write_gguf(folder / SECOND, architecture="qwen2", keys=keys, tensors=tensors)


CASES: dict[str, tuple[Change, str]] = {
    "missing": (lambda f: (f / SECOND).unlink(), rf"{SECOND}: does not exist"),
    "the same part twice": (lambda f: shutil.copy(f / FIRST, f / SECOND), rf"{SECOND}: says that it is part 0 of 2"),
    "more parts inside": (
        lambda f: write_part(f / SECOND, 1, count=3),
        rf"{SECOND}: says that it is part 1 of 3 .counted from 0., its name says 1 of 2",
    ),
    "a huge count": (lambda f: write_part(f / SECOND, 1, count=4_000_000_000), "says that it is part 1 of 4000000000"),
    "a count that is a text": (lambda f: write_part(f / SECOND, 1, count="two"), "says that it is part 1 of two"),
    "a count that is a list": (lambda f: write_part(f / SECOND, 1, count=[2, 2]), "says that it is part 1 of"),
    "a tensor in both": (
        lambda f: write_part(f / SECOND, 1, names=slice(0, 5)),
        r"tensor 'token_embd\.weight' is in .* and in |should hold 11 tensors, they hold",
    ),
    "tensors left out": (lambda f: write_part(f / SECOND, 1, names=slice(1, 2)), "should hold 11 tensors, they hold 7"),
    "another model's": (other_model, rf"{SECOND}: general\.architecture is 'qwen2', in {FIRST} it is 'llama'"),
    "no GGUF at all": (lambda f: (f / SECOND).write_bytes(b"x" * 100), rf"{SECOND}: is not a GGUF file"),
    "an empty one": (lambda f: (f / SECOND).write_bytes(b""), rf"{SECOND}: is empty"),
}


@pytest.mark.parametrize("case", CASES)
def test_parts_that_do_not_belong_together_are_told(
    folder: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, words = CASES[case]
    change(folder)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(folder)
    assert run_command(["plan", str(folder / FIRST)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_tensor_in_two_parts_that_count_right_is_told(folder: Path) -> None:
    for number, names in ((0, slice(0, 6)), (1, slice(5, 10))):
        write_part(folder / (FIRST, SECOND)[number], number, names=names)
    with pytest.raises(CheckpointError, match=r"tensor '.*' is in .*m-00001.* and in .*m-00002"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("m-00001-of-99999.gguf", "part 1 of 99999; parts are numbered from 1, and at most 1000 are read"),
        ("m-00005-of-00002.gguf", "part 5 of 2; parts are numbered from 1"),
        ("m-00000-of-00000.gguf", "part 0 of 0"),
    ],
)
def test_a_name_that_cannot_be_is_told_at_once(tmp_path: Path, name: str, words: str) -> None:
    write_gguf(tmp_path / name)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path / name)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)


def test_many_missing_parts_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_part(tmp_path / "m-00001-of-01000.gguf", 0, count=1000)
    assert run_command(["plan", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "999 problems" in said
    assert len(said) < 5000

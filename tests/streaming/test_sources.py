"""A model whose parts lie in several places, each with a prefix of its own, is the whole model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel
from streaming import LLM
from streaming.cli import run
from streaming.errors import CheckpointError, OptionError
from streaming.options import LoadOptions
from streaming.prepare import prepare
from streaming.sources import Source, parse_source
from tests.streaming.checkpoint.build import write_gguf

IDS = [3, 17, 99, 4]
PREFIX = "model.layers.1."
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def whole(tiny_folder: Callable[[TinyModel], Path]) -> Path:
    return tiny_folder(TinyModel(layers=2, files=1, seed=5))


@pytest.fixture
def weights(whole: Path) -> Weights:
    return load_file(whole / "model.safetensors")


@pytest.fixture
def split(whole: Path, weights: Weights, tmp_path: Path) -> tuple[Path, Path]:
    """The model without its last block, and that block under bare names, without a configuration."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    (first / "config.json").write_bytes((whole / "config.json").read_bytes())
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(PREFIX)}
    save_file(kept, first / "model.safetensors")
    block = {name.removeprefix(PREFIX): tensor for name, tensor in weights.items() if name.startswith(PREFIX)}
    names = sorted(block)
    save_file({name: block[name] for name in names[:3]}, second / "block-00001-of-00002.safetensors")
    save_file({name: block[name] for name in names[3:]}, second / "block-00002-of-00002.safetensors")
    return first, second


def answer(folder: Path, *sources: Source) -> tuple[np.ndarray, int, int]:
    """Logits, bytes read, bytes kept."""
    with LLM(folder, sources=sources) as llm:
        logits = llm.logits(IDS).numpy()
        llm.wait_loaded()
        return logits, llm.stats().bytes_read, llm.stats().bytes_kept


def test_a_model_split_over_two_folders_is_the_whole_one(whole: Path, split: tuple[Path, Path]) -> None:
    first, second = split
    expected, found = answer(whole), answer(first, Source(path=str(second), prefix=PREFIX))
    assert np.array_equal(found[0], expected[0])
    assert found[1:] == expected[1:]


def test_three_sources_and_a_single_file_of_torch_save(whole: Path, split: tuple[Path, Path]) -> None:
    first, second = split
    half = second / "block-00002-of-00002.safetensors"
    torch.save(load_file(half), second / "rest.bin")
    half.unlink()
    sources = (
        Source(path=str(second), prefix=PREFIX, patterns=("block-*.safetensors",)),
        Source(path=str(second / "rest.bin"), prefix=PREFIX),
    )
    assert np.array_equal(answer(first, *sources)[0], answer(whole)[0])


def test_patterns_choose_files(split: tuple[Path, Path], weights: Weights) -> None:
    first, second = split
    save_file({"stray.weight": torch.ones(2, 2)}, second / "other.safetensors")
    source = Source(path=str(second), prefix=PREFIX, patterns=("block-*.safetensors",))
    prepared = prepare(str(first), LoadOptions(sources=[source]))
    assert set(prepared.checkpoint.tensors) == set(weights)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.stray\.weight in other\.safetensors: no parameter"):
        prepare(str(first), LoadOptions(sources=[Source(path=str(second), prefix=PREFIX)]))


def test_a_name_in_two_sources_is_an_error_that_names_both_files(split: tuple[Path, Path]) -> None:
    first, second = split
    again = second / "again.safetensors"
    save_file({"norm.weight": torch.ones(64)}, again)
    with pytest.raises(CheckpointError) as caught:
        prepare(str(first), LoadOptions(sources=[Source(path=str(again), prefix="model.")]))
    files = f"{first / 'model.safetensors'} and {again}"
    assert str(caught.value) == (
        f"tensor 'model.norm.weight' is in two sources, {files}: remove one, or give the second a prefix of its own"
    )


def test_a_part_that_is_nowhere_is_missing(split: tuple[Path, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight is missing"):
        prepare(str(split[0]), LoadOptions())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("encoder", Source(path="encoder")),
        ("owner/name@main=vision.", Source(path="owner/name@main", prefix="vision.")),
        ("some/folder=", Source(path="some/folder")),
        ("a=b=vision.,x-*.bin,y.pt", Source(path="a=b", prefix="vision.", patterns=("x-*.bin", "y.pt"))),
        ("encoder=,*.bin", Source(path="encoder", patterns=("*.bin",))),
    ],
)
def test_how_a_source_is_written(text: str, expected: Source) -> None:
    assert parse_source(text) == expected


def test_a_path_that_exists_is_one_whatever_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()
    assert parse_source(str(folder)) == Source(path=str(folder))


@pytest.mark.parametrize("text", ["=vision.", "encoder=x,", "encoder=x,sub/*.bin"])
def test_a_source_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--source"):
        parse_source(text)


def test_sources_that_cannot_be_are_refused(split: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = split
    gguf = write_gguf(tmp_path / "model.gguf")
    refusals = {
        str(second / "nowhere"): (CheckpointError, "no such folder or file"),
        str(first / "config.json"): (CheckpointError, "a further source is a folder or a file whose name ends in"),
        str(gguf): (CheckpointError, "a further source is a folder or a file whose name ends in"),
        "https://host.invalid/folder/": (OptionError, "is a local path or a hub id, not an address"),
    }
    for path, (kind, words) in refusals.items():
        with pytest.raises(kind, match=words):
            prepare(str(first), LoadOptions(sources=[Source(path=path)]))
    with pytest.raises(OptionError, match="not with a model of format gguf"):
        prepare(str(gguf), LoadOptions(sources=[Source(path=str(second))]))
    with pytest.raises(OptionError, match="is a file; patterns choose files of a folder"):
        prepare(str(first), LoadOptions(sources=[Source(path=str(first / "model.safetensors"), patterns=("*",))]))
    with pytest.raises(OptionError, match=r"patterns '\*\.bin': a tuple of names is needed"):
        Source(path=str(second), patterns="*.bin")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="a list of Source values"):
        LoadOptions(sources=Source(path=str(second)))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="a list of Source values"):
        LoadOptions(sources=["encoder"])  # type: ignore[list-item]


def test_the_command_line_takes_sources(
    whole: Path, split: tuple[Path, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = split
    assert run(["plan", str(first), "--source", f"{second}={PREFIX}", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert run(["plan", str(whole), "--json"]) == 0
    expected = json.loads(capfd.readouterr().out)
    assert (found["bytes_read"], found["bytes_kept"]) == (expected["bytes_read"], expected["bytes_kept"])
    assert run(["verify", str(first), "--source", f"{second}={PREFIX}"]) == 2
    assert "verify reads one model's own files" in capfd.readouterr().err

"""A file that another one of the same size replaces right behind the reading of its header is noticed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.write_tiny_model import TinyModel, write_tiny_model
from streaming import LLM, LayerLoadError, LoadOptions
from streaming.checkpoint import file_kinds, gguf_model
from streaming.errors import CheckpointError
from streaming.prepare import open_model, prepare
from streaming.sources import Source
from tests.streaming.checkpoint.build import write_gguf


def replaced_after(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """`read`, behind which the file is replaced by a copy of itself."""

    def read_and_replace(path: Path) -> Any:
        found = read(path)
        twin = path.with_name("twin")
        shutil.copy2(path, twin)  # its size and its time as well
        os.replace(twin, path)
        return found

    return read_and_replace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", model=TinyModel(layers=2, files=1))


@pytest.mark.parametrize("how", [{}, {"reader": "threads"}, {"safetensors_load_strategy": "lazy"},
                                 {"safetensors_load_strategy": "eager"}])  # fmt: skip
def test_weights_that_were_replaced_behind_their_header_are_refused(
    folder: Path, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = file_kinds.SAFETENSORS_KIND
    swapped = (replace(kind, read_header=replaced_after(kind.read_header)), *file_kinds.HF_KINDS[1:])
    monkeypatch.setattr(file_kinds, "HF_KINDS", swapped)
    with pytest.raises((CheckpointError, LayerLoadError), match="was changed, or replaced, during the load"):  # noqa: SIM117
        with LLM(folder, **how) as llm:
            llm.logits([5, 9, 2])


def test_a_gguf_keeps_the_state_from_before_its_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    before = path.stat()
    monkeypatch.setattr(gguf_model, "read_gguf_header", replaced_after(gguf_model.read_gguf_header))
    prepared = prepare(str(path), LoadOptions())
    assert prepared.read_plan.states == ((before.st_dev, before.st_ino, before.st_size, before.st_mtime_ns),)
    assert path.stat().st_ino != before.st_ino


def test_files_of_further_sources_are_looked_at_too(folder: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    part.mkdir()
    file = folder / "model.safetensors"
    shutil.copy(file, part / "part.safetensors")
    checkpoint = open_model(str(folder), LoadOptions(sources=(Source(path=str(part), prefix="other."),)))
    assert checkpoint.states.keys() == {file, part / "part.safetensors"}

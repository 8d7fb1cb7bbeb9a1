"""A config that ties embedding and head, and files that hold both: equal copies become one, memory comes back."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel
from streaming import LLM, Hooks, SamplingParams
from streaming.errors import CheckpointError
from streaming.reader import ProcessReader
from streaming.retie import compare_tied


@pytest.fixture
def twice(tiny_folder: Callable[[TinyModel], Path], tmp_path: Path) -> Path:
    """Both matrices on disk, equal, large enough to span pages."""
    model = TinyModel(layers=1, files=1, vocab_size=4096)
    folder = Path(shutil.copytree(tiny_folder(model), tmp_path / "twice"))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return folder


def test_equal_matrices_become_one_and_the_memory_of_the_other_is_given_back(
    twice: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[ProcessReader] = []

    def open_and_keep(prepared: object) -> ProcessReader:
        readers.append(ProcessReader(prepared.read_plan))  # type: ignore[attr-defined]
        return readers[0]

    monkeypatch.setattr("streaming.llm.start_reader", open_and_keep)
    told: list[str] = []
    ids, params = [5, 9, 2], SamplingParams(max_tokens=4, ignore_eos=True)
    with LLM(twice, hooks=Hooks(warn=told.append)) as llm:
        first = llm.complete([ids], params)[0].token_ids
        llm.wait_loaded()
        again = llm.complete([ids], params)[0].token_ids  # behind the step in which the memory is given back
        table, head = llm.shell.get_parameter("model.embed_tokens.weight"), llm.shell.get_parameter("lm_head.weight")
        assert table.data_ptr() == head.data_ptr()
        kept = llm.stats().bytes_kept
        assert readers[0].shared_nbytes <= kept - head.nbytes + (1 << 16)  # but for pages shared with neighbours
    assert first == again
    assert told == []


def test_a_file_that_changes_before_its_matrices_are_compared_is_named(
    twice: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are compared where they lie in it (`lazy`): behind its new end an access would end the process."""
    file, compare = twice / "model.safetensors", compare_tied
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    padded = -(-(8 + size) // 64) * 64 - 8  # so that its data are aligned, and stay in the file
    file.write_bytes(padded.to_bytes(8, "little") + data[8 : 8 + size].ljust(padded) + data[8 + size :])

    def change_and_compare(*arguments: Any) -> None:
        os.utime(file, ns=(1, 1))
        compare(*arguments)

    monkeypatch.setattr("streaming.model_run.compare_tied", change_and_compare)
    with LLM(twice, safetensors_load_strategy="lazy") as llm:
        assert llm.prepared.read_plan.mapped
        with pytest.raises(CheckpointError, match="was written to since the load was planned"):
            llm.wait_loaded()


def test_a_tied_table_serves_a_quantized_head_too(tiny_folder: Callable[[TinyModel], Path]) -> None:
    """It is read twice, once for each; its faults are told once."""
    told: list[str] = []
    folder = tiny_folder(TinyModel(layers=1, tied=True))
    with LLM(folder, quantization="int8_per_channel", quantize_head=True, hooks=Hooks(warn=told.append)) as llm:
        llm.wait_loaded()
        assert len(llm.complete([[5, 9]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3
        assert llm.shell.get_parameter("lm_head.weight").dtype.itemsize == 1
        assert llm.shell.get_parameter("model.embed_tokens.weight").dtype.itemsize == 2
    assert told == []

"""A model's own defaults for generating: where they come from, what is added up, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streaming.checkpoint.tensors import Checkpoint
from streaming.errors import CheckpointFormatError
from streaming.generation_config import GenerationDefaults, read_generation_defaults

from .metadata import gguf_checkpoint


def _read(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> GenerationDefaults:
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_generation_defaults(Checkpoint(folder, "safetensors", {}, (), config, {}))


def test_end_ids_are_those_of_both_files(tmp_path: Path) -> None:
    found = _read(
        tmp_path,
        {"eos_token_id": 2, "bos_token_id": 1, "text_config": {"eos_token_id": [5]}},
        {"eos_token_id": [128009, 128001, 2], "bos_token_id": 9, "do_sample": True, "temperature": 0.6, "top_k": 20,
         "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.1, "transformers_version": "5.0", "max_length": 10},
    )  # fmt: skip
    assert found == GenerationDefaults(
        eos_ids=(2, 5, 128001, 128009), bos_id=9, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.0,
        repetition_penalty=1.1,
    )  # fmt: skip


def test_without_files_nothing_is_said(tmp_path: Path) -> None:
    assert _read(tmp_path, {}) == GenerationDefaults()


def test_null_and_minus_one_are_no_ids(tmp_path: Path) -> None:
    found = _read(tmp_path, {"eos_token_id": None, "bos_token_id": -1}, {"eos_token_id": [-1, 7], "temperature": None})
    assert found == GenerationDefaults(eos_ids=(7,))


@pytest.mark.parametrize(
    ("generation", "words"),
    [
        ({"eos_token_id": "2"}, "eos_token_id is '2'; a token id or a list of them was expected"),
        ({"eos_token_id": [1, 2.5]}, "eos_token_id is [1, 2.5]; a token id or a list of them was expected"),
        ({"eos_token_id": True}, "eos_token_id is True; a token id"),
        ({"eos_token_id": -2}, "eos_token_id is -2; a token id"),
        ({"do_sample": 1}, "do_sample is 1; true or false was expected"),
        ({"temperature": "hot"}, "temperature is 'hot'; a number of 0 or more was expected"),
        ({"temperature": -0.1}, "temperature is -0.1; a number of 0 or more was expected"),
        ({"temperature": float("nan")}, "temperature is nan; a number of 0 or more was expected"),
        ({"temperature": float("inf")}, "temperature is inf; a number of 0 or more was expected"),
        ({"top_k": 2.5}, "top_k is 2.5; a whole number, 0 or more, was expected"),
        ({"top_k": -1}, "top_k is -1; a whole number, 0 or more, was expected"),
        ({"top_p": 1.5}, "top_p is 1.5; a number from 0 to 1 was expected"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; a number above 0 was expected"),
    ],
)
def test_values_that_cannot_be_are_named_with_file_and_key(
    tmp_path: Path, generation: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointFormatError) as error:
        _read(tmp_path, {}, generation)
    assert str(error.value).startswith(f"{tmp_path}/generation_config.json: {words}")


def test_a_wrong_id_of_config_json_names_that_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFormatError, match=r"/config\.json: eos_token_id is 'x'; a token id"):
        _read(tmp_path, {"eos_token_id": "x"})


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"a": 1\n')
    with pytest.raises(CheckpointFormatError, match=r"generation_config.json: is not valid JSON: .* line 2 column 1"):
        _read(tmp_path, {})


def test_gguf_metadata_name_the_ends_of_text_turn_and_message() -> None:
    metadata = {
        "tokenizer.ggml.eos_token_id": 128001,
        "tokenizer.ggml.eot_token_id": 128009,
        "tokenizer.ggml.eom_token_id": 128008,
        "tokenizer.ggml.bos_token_id": 128000,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 40,
    }
    assert read_generation_defaults(gguf_checkpoint(metadata)) == GenerationDefaults(
        eos_ids=(128001, 128008, 128009), bos_id=128000, temperature=0.5, top_k=40
    )


def test_gguf_ids_that_say_none_or_cannot_be() -> None:
    none = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 0xFFFFFFFF}
    assert read_generation_defaults(gguf_checkpoint(none)).eos_ids == (2,)
    with pytest.raises(CheckpointFormatError, match=r"model.gguf: tokenizer.ggml.eos_token_id is 2.5; a token id was"):
        read_generation_defaults(gguf_checkpoint({"tokenizer.ggml.eos_token_id": 2.5}))


def test_the_demo_model_ends_at_its_turns_end(demo_path: Path) -> None:
    from streaming.checkpoint.gguf import read_gguf_header

    assert read_generation_defaults(gguf_checkpoint(read_gguf_header(demo_path).metadata)).eos_ids == (2,)

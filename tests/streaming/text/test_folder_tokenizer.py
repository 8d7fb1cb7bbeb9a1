"""Tokenizers from a folder: tokenizer.json and the files beside it, present, missing or broken."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from streaming.checkpoint.tensors import Checkpoint
from streaming.errors import CheckpointError, CheckpointFormatError, StreamingError
from streaming.text_decoding import DecodingKind
from streaming.tokenizer import Tokenizer, open_tokenizer

# A byte-level tokenizer of few words; its post-processor begins every text with <s>.
_TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
    "padding": {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<s>",
    },
    "added_tokens": [
        {"id": 0, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True},
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    },
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE", "vocab": {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4, "Ġ": 5, "Ġab": 6},
        "merges": [["a", "b"], ["Ġ", "ab"]],
    },
}  # fmt: skip


def test_text_becomes_ids_uncut_and_unpadded(tmp_path: Path) -> None:
    tokenizer = _open(tmp_path)
    assert tokenizer.encode("ab ab abb", add_special_tokens=True) == [0, 4, 6, 6, 3]
    assert tokenizer.encode("ab ab", add_special_tokens=False) == [4, 6]
    assert tokenizer.encode("a<s>b", add_special_tokens=False) == [2, 0, 3]
    assert tokenizer.decode([0, 4, 6], skip_special_tokens=True) == "ab ab"
    assert tokenizer.decode([0, 4, 99], skip_special_tokens=False) == "<s>ab"
    assert (tokenizer.vocab_size, tokenizer.special_ids, tokenizer.decoding.kind) == (7, {0}, DecodingKind.BYTE_LEVEL)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.chat_template) == (None, None, None)


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({}, [0, 4]),  # the post-processor's
        ({"add_bos_token": True}, [0, 4]),
        ({"add_bos_token": False}, [4]),
        ({"add_eos_token": True}, [4, 1]),
        ({"add_bos_token": True, "add_eos_token": True}, [0, 4, 1]),
    ],
)
def test_the_configs_flags_replace_the_post_processor(tmp_path: Path, config: dict[str, Any], ids: list[int]) -> None:
    named = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "pad_token": None}
    tokenizer = _open(tmp_path, tokenizer_config={**named, **config})
    assert tokenizer.encode("ab", add_special_tokens=True) == ids
    assert tokenizer.encode("ab", add_special_tokens=False) == [4]
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)


def test_special_tokens_map_serves_and_the_config_goes_before_it(tmp_path: Path) -> None:
    tokenizer = _open(
        tmp_path,
        special_tokens_map={"bos_token": {"content": "<s>"}, "eos_token": "a"},
        tokenizer_config={"eos_token": "</s>"},
    )
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_tokens_that_only_the_config_adds_are_added(tmp_path: Path) -> None:
    added = {
        "0": {"content": "<s>", "special": True},
        "7": {"content": "<|x|>", "special": True},
        "8": {"content": "<y>", "special": False},
    }
    tokenizer = _open(tmp_path, tokenizer_config={"added_tokens_decoder": added})
    assert tokenizer.encode("a<|x|>b<y>", add_special_tokens=False) == [2, 7, 3, 8]
    assert tokenizer.special_ids == {0, 7}


def test_chat_templates_come_from_files_first_then_the_config(tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]}
    tokenizer = _open(tmp_path, tokenizer_config=config, chat_template={"chat_template": "older"})
    assert (tokenizer.chat_template, tokenizer.chat_templates) == ("A", {"default": "A", "tool_use": "B"})

    (tmp_path / "chat_template.jinja").write_text("C é", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("D", encoding="utf-8")
    assert open_tokenizer(_checkpoint(tmp_path)).chat_templates == {"default": "C é", "rag": "D"}


def test_a_chat_template_json_and_a_plain_text_are_taken(tmp_path: Path) -> None:
    assert _open(tmp_path, chat_template={"chat_template": "older"}).chat_template == "older"
    assert _open(tmp_path, tokenizer_config={"chat_template": "plain"}).chat_template == "plain"


def test_the_folder_of_a_single_weights_file_is_used(tmp_path: Path) -> None:
    _open(tmp_path)
    (tmp_path / "model.safetensors").touch()
    checkpoint = Checkpoint(tmp_path / "model.safetensors", "safetensors", {}, (), {}, {})
    assert open_tokenizer(checkpoint).vocab_size == 7


def test_a_folder_without_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        open_tokenizer(_checkpoint(tmp_path))
    assert str(error.value) == (
        f"{tmp_path}: has no tokenizer.json; fetch the model's tokenizer.json, or give token ids (--ids 1,2,3), "
        "which need none"
    )


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.model.v3", "vocab.json"])
def test_another_librarys_vocabulary_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError) as error:
        open_tokenizer(_checkpoint(tmp_path))
    assert f"has no tokenizer.json ({name} is there, but is not read); write a tokenizer.json with" in str(error.value)
    assert "--ids 1,2,3" in str(error.value)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer.json": "{"}, "tokenizer.json: tokenizers "),
        ({"tokenizer.json": '{"version": "1.0", "model": {"type": "Wishes"}}'}, " cannot read it: "),
        ({"tokenizer_config.json": "{,"}, "tokenizer_config.json: is not valid JSON: Expecting property name"),
        ({"tokenizer_config.json": "[]"}, "tokenizer_config.json: holds a JSON list, not an object"),
        ({"tokenizer_config.json": '{"bos_token": 7}'}, "tokenizer_config.json: bos_token is 7; a text was expected"),
        ({"tokenizer_config.json": '{"add_bos_token": "no"}'}, "add_bos_token is 'no'; true or false was expected"),
        ({"tokenizer_config.json": '{"chat_template": 1}'}, "chat_template is a int; a text or a list of"),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "a"}]}'}, "chat_template is a dict; a text or a list"),
        ({"tokenizer_config.json": '{"added_tokens_decoder": {"x": {}}}'}, "added_tokens_decoder holds 'x': {};"),
        ({"special_tokens_map.json": '{"eos_token": []}'}, "special_tokens_map.json: eos_token is []; a text"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, files: dict[str, str], words: str) -> None:
    _open(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointFormatError) as error:
        open_tokenizer(_checkpoint(tmp_path))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_text_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StreamingError, match="the text holds bytes that are not UTF-8"):
        _open(tmp_path).encode("a\udcff", add_special_tokens=False)


def test_without_the_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, {"tokenizer": _TOKENIZER})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.delitem(sys.modules, "streaming.fast_tokenizer", raising=False)
    with pytest.raises(StreamingError, match=r"pip install tokenizers, or give token ids \(--ids 1,2,3\)"):
        open_tokenizer(_checkpoint(tmp_path))


def _open(folder: Path, **files: Any) -> Tokenizer:
    """A folder of `NAME.json` files, tokenizer.json among them, opened."""
    _write(folder, {"tokenizer": _TOKENIZER, **files})
    return open_tokenizer(_checkpoint(folder))


def _write(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def _checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(folder, "safetensors", tensors={}, files=(), config={}, metadata={})

"""Ids, text and rendered conversations against transformers, for the files that both read."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from streaming.chat_template import render_chat
from streaming.checkpoint.gguf import read_gguf_header
from streaming.checkpoint.tensors import Checkpoint
from streaming.fast_tokenizer import build_tokenizer
from streaming.gguf_tokenizer import gguf_recipe
from streaming.tokenizer import Tokenizer, open_tokenizer

from .metadata import gguf_checkpoint, sentencepiece_metadata
from .templates import CHATML, HARMONY, LLAMA3, MISTRAL, TOOLS

_TEXTS = [
    "The sea is 12345 km wide, isn't it?", "  leading", "trailing  ", "   ", "\t\ttabs\n\n\nand lines\r\n", "",
    "def f(x):\n    return x**2 + 0x1F  # ok\n", "naïve café ÅÉÎ", "日本語とEnglish 中文", "مرحبا Привет",
    "😀👨‍👩‍👧 🇫🇷 e\u0301", "HTTPServer snake_case kebab-case", "a" * 60, "{}[]<>!?;:--==", "\u00a0\u2003x\u200b",
    "the</s>the <s> <unk><|user|> x", "<|im_start|>user\nhi<|im_end|>\n", "in the sea the thing is",
]  # fmt: skip


def _random_texts(alphabet: str, count: int) -> list[str]:
    rng = random.Random(7)
    return ["".join(rng.choices(alphabet, k=rng.randrange(1, 40))) for _ in range(count)]


def _write_gguf(path: Path, metadata: dict[str, Any]) -> None:
    """A GGUF file of the metadata alone, by the gguf package."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif key != "general.architecture":
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("llama", {}), ("phi3", {}), ("gemma2", {}), ("llama", {"tokenizer.ggml.scores": [0.0] * 287})],
)
def test_sentencepiece_from_gguf(tmp_path: Path, architecture: str, changes: dict[str, Any]) -> None:
    metadata = sentencepiece_metadata(**{"general.architecture": architecture, **changes})
    _write_gguf(tmp_path / "m.gguf", {**metadata, f"{architecture}.vocab_size": 287})
    reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = open_tokenizer(gguf_checkpoint(read_gguf_header(tmp_path / "m.gguf").metadata))
    _check_equal(ours, reference, [*_TEXTS, *_random_texts("the sain.é😀\n ", 100)])


@pytest.mark.slow
def test_the_demo_tokenizer(demo_path: Path, demo: Tokenizer) -> None:
    """transformers reads the file's merges but not its pre-tokenizer, which cuts at digits first: that is put in."""
    reference = AutoTokenizer.from_pretrained(demo_path.parent, gguf_file=demo_path.name)
    reference.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    _check_equal(demo, reference, [*_TEXTS, *_random_texts("abcXYZ 0123  \n\t.,!'éß中😀½-_/", 300)])


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}])
def test_a_folder_that_transformers_wrote(tmp_path: Path, flags: dict[str, bool]) -> None:
    PreTrainedTokenizerFast(
        tokenizer_object=_backend(), bos_token="<s>", eos_token="</s>", chat_template=CHATML, **flags
    ).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, **flags}))
    reference = AutoTokenizer.from_pretrained(tmp_path)
    ours = open_tokenizer(Checkpoint(tmp_path, "safetensors", {}, (), {}, {}))
    _check_equal(ours, reference, _TEXTS)
    assert (ours.bos_id, ours.eos_id) == (reference.bos_token_id, reference.eos_token_id)
    assert ours.chat_template == reference.chat_template == CHATML


def _backend() -> tokenizers.Tokenizer:
    return build_tokenizer(gguf_recipe(sentencepiece_metadata(), source="by hand"))._backend


def _check_equal(ours: Tokenizer, reference: Any, texts: Sequence[str]) -> None:
    for text in texts:
        ids = reference.encode(text)
        assert ours.encode(text, add_special_tokens=True) == ids, text
        assert ours.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False), text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip), text


_TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": " What is <b>1 & 2</b>? "},
    {"role": "assistant", "content": "  Three. é"},
    {"role": "user", "content": "Thanks\n"},
]
_CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Zürich <1>"}}}]}
_PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "one"}, {"type": "image"}, {"type": "text", "text": "2"}],
}
_TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}

_ANSWER = {"role": "tool", "content": "Rain, 3 °C"}
_DESCRIBED = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What the weather is like",
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["C", "F"], "default": "C", "nullable": True},
                "days": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
                "at": {"type": ["number", "null"], "default": None},
            },
        },
    },
}


@pytest.mark.parametrize(
    ("template", "messages", "tools"),
    [
        (CHATML, [{"role": "system", "content": "Be brief."}, *_TURNS], None),
        (LLAMA3, _TURNS, None),
        (LLAMA3, [{"role": "system", "content": " Be brief. "}, *_TURNS, _CALL], None),
        (MISTRAL, _TURNS, None),
        (TOOLS, [*_TURNS, _PARTS], [_TOOL, _TOOL]),
        (TOOLS, _TURNS, None),
        (HARMONY, _TURNS, None),
        (HARMONY, [{"role": "developer", "content": "Be brief."}, *_TURNS], [_DESCRIBED]),
        (HARMONY, [_TURNS[0], {**_CALL, "thinking": "Where?"}, _ANSWER], [_DESCRIBED]),
        (HARMONY, [_TURNS[0], {**_CALL, "thinking": "Where?"}, _ANSWER, _TURNS[1]], [_DESCRIBED]),
    ],
)
@pytest.mark.parametrize("opening", [True, False])
def test_rendered_conversations(template: str, messages: list[Any], tools: list[Any] | None, opening: bool) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_object=_backend(), bos_token="<s>", eos_token="</s>")
    expected = reference.apply_chat_template(
        messages, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=opening,
        enable_thinking=False,
    )  # fmt: skip
    found = render_chat(
        template, messages, add_generation_prompt=opening, tools=tools, bos_token="<s>", eos_token="</s>",
        variables={"enable_thinking": False},
    )  # fmt: skip
    assert found == expected

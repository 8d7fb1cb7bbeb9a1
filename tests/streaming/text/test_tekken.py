"""Mistral's tekken.json: ids as tiktoken gives them, and broken files named."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from streaming.checkpoint.tensors import Checkpoint
from streaming.errors import CheckpointFormatError
from streaming.tokenizer import Tokenizer, open_tokenizer

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = [
    b"he",
    b"th",
    b"the",
    b"in",
    b" s",
    b"ea",
    b"sea",
    b" sea",
    b"ing",
    b"\xc3\xa9",
    b"  ",
    b"hing",
    b"thing",
    b"x",
]
TOKENS = [*(bytes([byte]) for byte in range(256)), *dict.fromkeys(word for word in WORDS if len(word) > 1)]
SPECIALS = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]


def write(folder: Path, **changes: Any) -> Path:
    """A folder with a tekken.json of few words; 8 special tokens, of which three are unnamed."""
    content = {
        "config": {
            "pattern": PATTERN, "default_vocab_size": 8 + len(TOKENS), "default_num_special_tokens": 8, "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate([*TOKENS, b"never"])
        ],
        "special_tokens": [
            {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(SPECIALS)
        ],
    }  # fmt: skip
    (folder / "tekken.json").write_text(json.dumps({**content, **changes}))
    return folder


def opened(folder: Path) -> Tokenizer:
    return open_tokenizer(Checkpoint(folder, "safetensors", {}, (), {}, {}))


# Ids by tiktoken 0.14.0 from the same ranks and pattern, 8 added for the special tokens.
IDS: list[tuple[str, list[int]]] = [
    ("the sea", [266, 271]),
    ("something thin", [123, 119, 117, 109, 276, 40, 265, 267]),
    ("état  x\n\n12", [273, 124, 105, 124, 40, 40, 128, 18, 18, 57, 58]),
    ("heinthe", [264, 267, 266]),
    ("日 sea/he", [238, 159, 173, 271, 55, 264]),
    ("", []),
]


@pytest.mark.parametrize(("text", "ids"), IDS)
def test_ids_are_tiktokens_and_give_the_text_back(text: str, ids: list[int], tmp_path: Path) -> None:
    tokenizer = opened(write(tmp_path))
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.encode(text, add_special_tokens=True) == [1, *ids]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_come_first_and_unnamed_ones_have_their_numbers(tmp_path: Path) -> None:
    tokenizer = opened(write(tmp_path))
    assert [tokenizer.piece(index) for index in range(8)] == [*SPECIALS, "<SPECIAL_5>", "<SPECIAL_6>", "<SPECIAL_7>"]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 8 + len(TOKENS))
    assert tokenizer.encode("[INST]the[/INST]", add_special_tokens=True) == [1, 3, 8 + TOKENS.index(b"the"), 4]
    assert tokenizer.decode([1, 3, 8 + TOKENS.index(b"the"), 2], skip_special_tokens=True) == "the"


def test_files_that_list_no_special_tokens_have_the_first_version_s(tmp_path: Path) -> None:
    tokenizer = opened(write(tmp_path, special_tokens=None))
    assert [tokenizer.piece(index) for index in (1, 3, 7)] == ["<s>", "[INST]", "[TOOL_RESULTS]"]


def test_a_chat_template_beside_it_is_taken(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert opened(write(tmp_path)).chat_template == "{{ messages[0].content }}"


def vocab(**changes: Any) -> list[dict[str, Any]]:
    """The vocabulary with one wrong token."""
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode()}
        for rank, token in enumerate([*TOKENS, b"never"])
    ]
    entries[258] |= changes
    return entries


CONFIG = {"pattern": PATTERN, "default_vocab_size": 8 + len(TOKENS), "default_num_special_tokens": 8}
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no config": ({"config": None}, "has no config with a pattern"),
    "a size in words": ({"config": {**CONFIG, "default_vocab_size": "many"}}, "default_vocab_size is 'many'"),
    "endlessly many": ({"config": {**CONFIG, "default_num_special_tokens": 10**12}}, "is 1000000000000, not"),
    "more than there are": ({"config": {**CONFIG, "default_vocab_size": 1000}}, "992 are needed"),
    "fewer than bytes": ({"config": {**CONFIG, "default_vocab_size": 100}}, "92 are needed, and 256 at least"),
    "a wrong pattern": ({"config": {**CONFIG, "pattern": "(["}}, "the tokenizer cannot be built"),
    "a wrong rank": ({"vocab": vocab(rank=7)}, r"vocab\[258\] is no new token of rank 258"),
    "no base64": ({"vocab": vocab(token_bytes="?")}, r"vocab\[258\] is no new token"),
    "a token twice": ({"vocab": vocab(token_bytes="YQ==")}, r"vocab\[258\] is no new token"),
    "an endless token": ({"vocab": vocab(token_bytes="YWFh" * 400)}, r"vocab\[258\] is no new token"),
    "a special one twice": (
        {"special_tokens": [{"rank": 0, "token_str": "a"}, {"rank": 1, "token_str": "a"}]}, "holds a token twice",
    ),
    "special ones out of order": ({"special_tokens": [{"rank": 1, "token_str": "a"}]}, "has not the rank 0"),
    "a list for an object": ({"special_tokens": [1]}, "special_tokens is no list"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_file_is_named(fault: str, tmp_path: Path) -> None:
    changes, words = BROKEN[fault]
    with pytest.raises(CheckpointFormatError, match=words) as caught:
        opened(write(tmp_path, **changes))
    assert str(tmp_path / "tekken.json") in str(caught.value)

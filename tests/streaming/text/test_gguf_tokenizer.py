"""Tokenizers from GGUF metadata: the demo model's ids, SentencePiece by hand, pre-tokenizers, broken metadata."""

from __future__ import annotations

from typing import Any

import pytest

from streaming.errors import CheckpointError, CheckpointFormatError
from streaming.tokenizer import Tokenizer, open_tokenizer

from .metadata import gguf_checkpoint, sentencepiece_metadata

# Ids by llama.cpp (llama-cpp-python 0.3.36) for the same file.
_DEMO_IDS = [
    ("The sea is", [504, 3426, 314]),
    ("12345", [33, 34, 35, 36, 37]),
    ("a  12  3", [81, 256, 33, 34, 256, 35]),
    ("def f(x):\n    return x**2 + 10\n", [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 1232, 216, 33, 32, 198]),
    ("naïve café, 日本語", [3546, 46494, 37366, 28, 17097, 241, 115, 40993, 179, 120, 248]),
    (
        "😀 👨‍👩‍👧",
        [10813, 242, 218, 15107, 235, 118, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117],
    ),
    ("<|im_start|>user\nhi<|im_end|>\n", [1, 4093, 198, 6004, 2, 198]),
    (" \t\n\n  x   ", [216, 197, 8866, 1792, 333]),
    ("²³ ½ ٣", [19133, 39050, 216, 16738, 216, 164, 113]),
]


@pytest.mark.parametrize(("text", "ids"), _DEMO_IDS)
def test_the_demo_tokenizer_gives_llama_cpps_ids_and_the_text_back(demo: Tokenizer, text: str, ids: list[int]) -> None:
    assert demo.encode(text, add_special_tokens=True) == ids
    assert demo.decode(ids, skip_special_tokens=False) == text


def test_the_demo_tokenizer_knows_its_special_tokens_and_its_template(demo: Tokenizer) -> None:
    assert (demo.vocab_size, demo.bos_id, demo.eos_id) == (49152, 1, 2)
    assert demo.special_tokens == {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>",
    }  # fmt: skip
    assert demo.special_ids == set(range(17))
    assert demo.chat_template is not None
    assert demo.chat_template.startswith("{% for message in messages %}")
    assert demo.decode([1, 4093, 2], skip_special_tokens=True) == "user"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("the sea", ["▁the", "▁sea"]),
        ("the sea is", ["▁the", "▁sea", "▁", "i", "s"]),  # "▁is" cannot be reached: neither "▁i" nor "is" is a piece
        ("thing", ["▁t", "h", "in", "<0x67>"]),  # the better scored "▁t" comes before "th"; "g" is spelled in bytes
        ("€é", ["▁", "<0xE2>", "<0x82>", "<0xAC>", "é"]),
        ("the</s>sea", ["▁the", "</s>", "s", "ea"]),
        ("the<|user|>", ["▁the", "<|user|>"]),
        ("", []),
    ],
)
def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(
    sentencepiece: Tokenizer, text: str, pieces: list[str]
) -> None:
    ids = sentencepiece.encode(text, add_special_tokens=False)
    assert [sentencepiece.piece(i) for i in ids] == pieces
    assert sentencepiece.encode(text, add_special_tokens=True) == [1, *ids]
    assert sentencepiece.decode(ids, skip_special_tokens=False) == text


def test_of_merges_with_equal_scores_the_longer_left_part_comes_first() -> None:
    tokenizer = _open(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "x", "y", "z", "w", "xy", "zw", "xyz"],
            "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -9.0, -1.0, -5.0, -5.0],
            "tokenizer.ggml.add_space_prefix": False,
        }
    )
    assert [tokenizer.piece(i) for i in tokenizer.encode("xyzw", add_special_tokens=False)] == ["xyz", "w"]


def test_sentencepiece_skips_control_tokens_but_not_user_defined_ones(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.special_ids == {0, 1, 2}
    ids = sentencepiece.encode("the</s><|user|>", add_special_tokens=True)
    assert sentencepiece.decode(ids, skip_special_tokens=True) == "the<|user|>"


def test_the_space_before_the_text_and_the_ends_are_the_files_choice() -> None:
    tokenizer = _open(
        sentencepiece_metadata(
            **{
                "tokenizer.ggml.add_space_prefix": False,
                "tokenizer.ggml.add_bos_token": False,
                "tokenizer.ggml.add_eos_token": True,
            }
        )
    )
    ids = tokenizer.encode("the sea", add_special_tokens=True)
    assert [tokenizer.piece(i) for i in ids] == ["t", "he", "▁sea", "</s>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the sea"


def test_a_sentencepiece_file_that_names_no_ids_uses_the_usual_ones() -> None:
    metadata = sentencepiece_metadata()
    del metadata["tokenizer.ggml.bos_token_id"], metadata["tokenizer.ggml.eos_token_id"]
    tokenizer = _open(metadata)
    assert tokenizer.special_tokens == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}


def test_phi3_puts_a_space_before_every_part_of_the_text() -> None:
    tokenizer = _open(sentencepiece_metadata(**{"general.architecture": "phi3"}))
    ids = tokenizer.encode(" sea</s>sea", add_special_tokens=False)
    assert [tokenizer.piece(i) for i in ids] == ["▁", "▁sea", "</s>", "▁sea"]


def test_gemma_ranks_by_order_and_spells_runs_of_spaces_as_one_piece() -> None:
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    tokenizer = _open(
        sentencepiece_metadata(
            **{
                "general.architecture": "gemma2",
                "tokenizer.ggml.tokens": ["  " if token == "▁▁" else token for token in tokens],
                "tokenizer.ggml.scores": [-1000.0] * len(tokens),  # not by these
            }
        )
    )
    ids = tokenizer.encode("the  sea", add_special_tokens=False)
    assert [tokenizer.piece(i) for i in ids] == ["t", "he", "▁", "▁sea"]
    assert [tokenizer.piece(i) for i in tokenizer.encode("t  t", add_special_tokens=False)] == ["t", "▁", "▁t"]
    assert [tokenizer.piece(i) for i in tokenizer.encode("t  .", add_special_tokens=False)] == ["t", "▁▁", "."]


_TEXT = "I'LL pay 1234 it's  7e\u0301 iOSApp (x);\n\n\t中文3!/\n #a"

# Parts by llama.cpp (0.3.36), whose vocabulary of the same file makes a token of every possible part. For tekken and
# gpt-4o it approximates the models' own expression; here is what that says (the accent belongs to its letter).
_PARTS = {
    "smollm": "I|'|LL| pay| |1|2|3|4| it|'s|  |7|e|\u0301| iOSApp| (|x|);|\n\n|\t|中文|3|!/|\n| #|a",
    "gpt-2": "I|'|LL| pay| 1234| it|'s| | 7|e|\u0301| iOSApp| (|x|);|\n\n|\t|中文|3|!/|\n| #|a",
    "llama-bpe": "I|'LL| pay| |123|4| it|'s| | |7|e|\u0301| iOSApp| (|x|);\n\n|\t中文|3|!/\n| #|a",
    "qwen2": "I|'LL| pay| |1|2|3|4| it|'s| | |7|e|\u0301| iOSApp| (|x|);\n\n|\t中文|3|!/\n| #|a",
    "qwen35": "I|'LL| pay| |1|2|3|4| it|'s| | |7|e\u0301| iOSApp| (|x|);\n\n|\t中文|3|!/\n| #|a",
    "tekken": "I|'LL| pay| |1|2|3|4| it|'s| | |7|e\u0301| i|OSApp| (|x|);\n\n|\t中文|3|!/\n| #|a",
    "gpt-4o": "I'LL| pay| |123|4| it's| | |7|e\u0301| i|OSApp| (|x|);\n\n|\t中文|3|!/\n| #|a",
    "deepseek-v3": "I|'LL| pay| |123|4| it|'s|  |7|e\u0301| iOSApp| (|x|);\n\n|\t|中文|3|!/\n| #|a",
    "deepseek-coder": "I|'|LL| pay| |1|2|3|4| it|'|s|  |7|e|\u0301| iOSApp| (|x|);|\n|\n|\t|中文|3|!/|\n| #|a",
    "falcon": "I|'|LL| pay| |123|4| it|'|s| | 7|e|\u0301| iOSApp| |(|x|);|\n\n|\t|中文|3|!/|\n |#|a",
    "seed-coder": "I|'LL| pay| |1|2|3|4| it|'s| | |7|e|\u0301| iOSApp| (|x|);|\n\n|\t中文|3|!/|\n| #|a",
    "bailingmoe": "I|'LL| pay| |1|2|3|4| it|'s| | |7|e|\u0301| iOSApp| (|x|);\n\n|\t中文|3|!/\n| #|a",
    "default": "I|'|LL| pay| |123|4| it|'|s| | |7|e|\u0301| iOSApp| |(|x|);|\n\n|\t|中文|3|!/|\n |#|a",
}


@pytest.fixture(scope="module")
def every_part() -> dict[str, Any]:
    """Metadata of a vocabulary in which every part of _TEXT is one token: merges for all its substrings."""
    spelled = "".join(_SPELLING[byte] for byte in _TEXT.encode())
    runs = {spelled[i:j] for i in range(len(spelled)) for j in range(i + 2, len(spelled) + 1)}
    ordered = sorted(runs, key=lambda run: (len(run), run))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*_SPELLING, *ordered],
        "tokenizer.ggml.merges": [f"{run[:cut]} {run[cut:]}" for run in ordered for cut in range(1, len(run))],
    }


def _spelling() -> list[str]:
    """The characters for the bytes 0 to 255 in GPT-2's vocabulary: 68 bytes are not printable and come after U+0100."""
    hidden = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    return [chr(0x100 + hidden.index(byte)) if byte in hidden else chr(byte) for byte in range(256)]


_SPELLING = _spelling()


@pytest.mark.parametrize("name", _PARTS)
def test_each_pretokenizer_cuts_as_its_models_do(every_part: dict[str, Any], name: str) -> None:
    tokenizer = _open({**every_part, "tokenizer.ggml.pre": name})
    ids = tokenizer.encode(_TEXT, add_special_tokens=False)
    assert "|".join(tokenizer.decode([i], skip_special_tokens=False) for i in ids) == _PARTS[name]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.pre": "of-tomorrow"}, "names the pre-tokenizer 'of-tomorrow', which is not known"),
        ({}, "names no pre-tokenizer (tokenizer.ggml.pre)"),
    ],
)
def test_an_unknown_pretokenizer_is_the_default_with_a_warning(
    every_part: dict[str, Any], caplog: pytest.LogCaptureFixture, changes: dict[str, Any], words: str
) -> None:
    tokenizer = _open({**every_part, **changes})
    ids = tokenizer.encode(_TEXT, add_special_tokens=False)
    assert "|".join(tokenizer.decode([i], skip_special_tokens=False) for i in ids) == _PARTS["default"]
    assert words in caplog.text


def test_llama_3_takes_a_whole_part_that_is_a_token_and_begins_with_bos() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*_SPELLING, "ab", "abc", "<|begin_of_text|>"],
        "tokenizer.ggml.merges": ["a b"],  # no merge leads to "abc"
        "tokenizer.ggml.token_type": [1] * 258 + [3],
        "tokenizer.ggml.bos_token_id": 258,
    }
    assert _open({**metadata, "tokenizer.ggml.pre": "llama-bpe"}).encode("abc", add_special_tokens=True) == [258, 257]
    assert _open({**metadata, "tokenizer.ggml.pre": "qwen2"}).encode("abc", add_special_tokens=True) == [256, ord("c")]


def test_tokens_that_are_no_text_keep_their_place() -> None:
    tokens = ["a", "", "\udcff", "b"]
    tokenizer = _open(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": [],
        }
    )
    assert (tokenizer.vocab_size, tokenizer.token_id("b")) == (4, 3)


def test_named_chat_templates_are_found() -> None:
    templates = {"tokenizer.chat_template": "one", "tokenizer.chat_template.tool_use": "two"}
    tokenizer = _open(sentencepiece_metadata(**templates))
    assert (tokenizer.chat_template, tokenizer.chat_templates) == ("one", {"default": "one", "tool_use": "two"})


@pytest.mark.parametrize("model", [None, "none", "bert"])
def test_a_file_without_a_known_tokenizer_says_to_give_ids(model: str | None) -> None:
    with pytest.raises(
        CheckpointError, match=r'model.gguf: has .*known are "gpt2" and "llama"; give token ids \(--ids'
    ):
        _open({"tokenizer.ggml.model": model} if model else {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing or is no list of texts"),
        ({"tokenizer.ggml.scores": [0.0]}, "tokenizer.ggml.scores has 1 entries for 287 tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type has 1 entries for 287 tokens"),
        ({"tokenizer.ggml.eos_token_id": 900}, "tokenizer.ggml.eos_token_id is 900, but there are 287 tokens"),
        ({"tokenizer.ggml.eos_token_id": "2"}, "tokenizer.ggml.eos_token_id is '2'; a token id was expected"),
        ({"tokenizer.ggml.model": "gpt2"}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["abc"]}, "holds 'abc'; two pieces"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["q z"]}, "the tokenizer cannot be built: "),
    ],
)
def test_metadata_that_contradict_themselves_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointFormatError) as error:
        _open(sentencepiece_metadata(**changes))
    assert str(error.value).startswith("model.gguf: ")
    assert words in str(error.value)


def _open(metadata: dict[str, Any]) -> Tokenizer:
    return open_tokenizer(gguf_checkpoint(metadata))

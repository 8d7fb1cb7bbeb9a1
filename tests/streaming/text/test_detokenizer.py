"""The streaming detokenizer: its pieces make up the text of the whole, and none is half a character."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from streaming.detokenizer import StreamingDetokenizer
from streaming.fast_tokenizer import FastTokenizer
from streaming.text_decoding import DecodingKind, decoding_from_json
from streaming.tokenizer import Tokenizer, open_tokenizer
from streaming.tokenizer_config import TokenizerSettings

from .metadata import gguf_checkpoint, sentencepiece_metadata


def _pieces(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, *, skip: bool = True) -> list[str]:
    """What is printed for `ids`, the rest at the end."""
    detokenizer = StreamingDetokenizer(tokenizer, prompt or [], skip_special_tokens=skip)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


def test_an_emoji_of_two_tokens_comes_whole(demo: Tokenizer) -> None:
    ids = demo.encode(" a😀 b👨‍👩‍👧", add_special_tokens=False)
    pieces = _pieces(demo, ids)
    assert [piece for piece in pieces if piece] == [" a", "😀", " b", "👨", "\u200d", "👩", "\u200d", "👧"]
    assert len(ids) > len("a😀b👨‍👩‍👧") + 1  # so some tokens were halves


def test_what_stays_incomplete_is_a_replacement_character_at_the_end(demo: Tokenizer) -> None:
    first_half = demo.encode("😀", add_special_tokens=False)[:1]
    assert _pieces(demo, first_half) == ["", "\ufffd"]
    assert _pieces(demo, [*first_half, *demo.encode("x", add_special_tokens=False)]) == ["", "\ufffdx", ""]


def test_a_character_that_the_prompt_began_is_printed_when_it_is_complete(demo: Tokenizer) -> None:
    first, second = demo.encode("😀", add_special_tokens=False)[:2], demo.encode("😀", add_special_tokens=False)[2:]
    assert "".join(_pieces(demo, [*second, 504], [504, *first])) == "😀The"


def test_special_tokens_are_left_out_unless_asked_for(demo: Tokenizer) -> None:
    assert _pieces(demo, [1, 504, 2]) == ["", "The", "", ""]
    assert _pieces(demo, [1, 504, 2], skip=False) == ["<|im_start|>", "The", "<|im_end|>", ""]


def test_ids_out_of_the_vocabulary_have_no_text(demo: Tokenizer) -> None:
    assert _pieces(demo, [504, 49152, 3426]) == ["The", "", " sea", ""]


def test_sentencepiece_drops_the_first_space_of_the_text_only(sentencepiece: Tokenizer) -> None:
    the, sea = sentencepiece.encode("the sea", add_special_tokens=False)
    assert _pieces(sentencepiece, [the, sea]) == ["the", " sea", ""]
    assert _pieces(sentencepiece, [sea], [the]) == [" sea", ""]
    assert _pieces(sentencepiece, [1, the]) == ["", "the", ""]  # <s> is skipped: the text begins after it


def test_byte_tokens_are_read_together_when_their_run_ends(sentencepiece: Tokenizer) -> None:
    euro, the = [229, 133, 175], 261
    assert _pieces(sentencepiece, [*euro, the]) == ["", "", "", "€ the", ""]
    assert _pieces(sentencepiece, euro) == ["", "", "", "€"]
    assert _pieces(sentencepiece, [*euro[:2], the]) == ["", "", "\ufffd\ufffd the", ""]
    assert _pieces(sentencepiece, [the, euro[2]], euro[:2]) == ["\ufffd\ufffd the", "", "\ufffd"]


@settings(deadline=None)
@given(st.data())
def test_pieces_make_up_the_text_of_the_demo_tokenizer(demo: Tokenizer, data: st.DataObject) -> None:
    _check_the_whole(demo, data, st.integers(0, 49160) | st.sampled_from(_BYTES))


# The demo vocabulary's first tokens after the special ones are single bytes: most sequences of them are not UTF-8.
_BYTES = range(17, 260)


@settings(deadline=None)
@given(st.data())
def test_pieces_make_up_the_text_of_a_sentencepiece_tokenizer(sentencepiece: Tokenizer, data: st.DataObject) -> None:
    _check_the_whole(sentencepiece, data, st.integers(0, 290) | st.sampled_from([261, 271, 266, 229, 133, 175]))


@settings(deadline=None)
@given(st.data())
def test_pieces_make_up_the_text_without_the_first_space(data: st.DataObject) -> None:
    metadata = sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False})
    _check_the_whole(open_tokenizer(gguf_checkpoint(metadata)), data, st.integers(255, 290))


def _check_the_whole(tokenizer: Tokenizer, data: st.DataObject, token_ids: st.SearchStrategy[int]) -> None:
    """decode(prompt + ids) is what the prompt gave, then the pieces; no piece ends in half a character."""
    prompt, ids = data.draw(st.lists(token_ids, max_size=8)), data.draw(st.lists(token_ids, max_size=24))
    skip = data.draw(st.booleans())
    before = "".join(_pieces(tokenizer, prompt, skip=skip)[:-1])
    pieces = _pieces(tokenizer, ids, prompt, skip=skip)
    assert before + "".join(pieces) == tokenizer.decode([*prompt, *ids], skip_special_tokens=skip)
    for piece in pieces:
        piece.encode("utf-8")  # no lone surrogates


_WORDS = ["[UNK]", "Ġ", "sea", "##s", "the", "▁sea", "▁the", "s", ",", "é"]


@pytest.mark.parametrize(
    ("decoder", "text"),
    [
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "the seas, the"),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}, None),
        (None, "the sea ##s , the"),
    ],
)
def test_other_decoders_are_followed_with_their_own_decode(decoder: dict[str, Any] | None, text: str | None) -> None:
    tokenizer = _of_words(decoder)
    assert tokenizer.decoding.kind is DecodingKind.OTHER
    ids = [4, 2, 3, 8, 4] if text else [6, 5, 7, 8, 6]
    pieces = _pieces(tokenizer, ids)
    assert "".join(pieces) == (text or "the seas, the")
    assert all(pieces[:-1])  # each token's text comes with it


def test_a_real_replacement_character_is_not_held_back_for_ever() -> None:
    tokenizer = _of_words(None, [*_WORDS, "\ufffd"])
    pieces = _pieces(tokenizer, [10] * 9 + [4])
    assert "".join(pieces) == "\ufffd " * 9 + "the"
    assert "".join(pieces[:4]) == "\ufffd \ufffd \ufffd \ufffd"


def _of_words(decoder: dict[str, Any] | None, words: list[str] = _WORDS) -> Tokenizer:
    model = {"type": "WordLevel", "vocab": {word: index for index, word in enumerate(words)}, "unk_token": "[UNK]"}
    parts = {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": decoder}
    backend = tokenizers.Tokenizer.from_str(json.dumps({"version": "1.0", "added_tokens": [], "model": model, **parts}))
    return FastTokenizer(backend, TokenizerSettings(), source="tokenizer.json")


_REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}


@pytest.mark.parametrize(
    ("steps", "kind"),
    [
        ([_REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}], DecodingKind.BYTE_FALLBACK),
        ([{"type": "ByteLevel"}], DecodingKind.BYTE_LEVEL),
        ([{"type": "ByteFallback"}, _REPLACE, {"type": "Fuse"}], DecodingKind.OTHER),
        ([{**_REPLACE, "pattern": {"Regex": "▁+"}}, {"type": "ByteFallback"}, {"type": "Fuse"}], DecodingKind.OTHER),
        (
            [{"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 0, "stop": 1}],
            DecodingKind.OTHER,
        ),
        ([_REPLACE, {"type": "Fuse"}], DecodingKind.OTHER),
    ],
)
def test_only_known_sequences_of_decoders_are_taken_apart(steps: list[dict[str, Any]], kind: DecodingKind) -> None:
    assert decoding_from_json({"type": "Sequence", "decoders": steps}).kind is kind

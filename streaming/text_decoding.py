"""How a tokenizer's pieces become text, as data for the streaming detokenizer. [no-torch]"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class DecodingKind(Enum):
    """The decoders that language models use."""

    BYTE_LEVEL = "byte level"  # every character of a piece stands for one byte (GPT-2's alphabet)
    BYTE_FALLBACK = "byte fallback"  # pieces are text; "<0xE2>" stands for one byte (SentencePiece)
    OTHER = "other"  # anything else: known to the tokenizer's own decode only


@dataclass(frozen=True)
class Decoding:
    """One tokenizer's decoder.

    For BYTE_FALLBACK: `replacements` are made in every piece, and up to `strip_left` spaces are taken off the text's
    beginning (the space that SentencePiece put before the first word).
    """

    kind: DecodingKind
    replacements: tuple[tuple[str, str], ...] = ()
    strip_left: int = 0


def decoding_from_json(decoder: Mapping[str, Any] | None) -> Decoding:
    """Recognise the "decoder" entry of a tokenizer.json; whatever is not known exactly is OTHER."""
    if decoder is None:
        return Decoding(DecodingKind.OTHER)
    if decoder.get("type") == "ByteLevel":
        return Decoding(DecodingKind.BYTE_LEVEL)
    if decoder.get("type") == "Sequence":
        steps = decoder.get("decoders") or []
        if len(steps) == 1:
            return decoding_from_json(steps[0])
        return _sentencepiece(steps) or Decoding(DecodingKind.OTHER)
    return Decoding(DecodingKind.OTHER)


def _sentencepiece(steps: Sequence[Mapping[str, Any]]) -> Decoding | None:
    """Replace..., ByteFallback, Fuse, Strip from the left: in this order; None for any other sequence."""
    rest = list(steps)
    replacements = []
    while rest and rest[0].get("type") == "Replace":
        pattern = rest.pop(0)
        old = pattern.get("pattern", {}).get("String")
        if not old:
            return None  # a regular expression could match across pieces
        replacements.append((old, pattern["content"]))
    if [step.get("type") for step in rest[:2]] != ["ByteFallback", "Fuse"]:
        return None
    strip_left = 0
    for step in rest[2:]:
        if step.get("type") != "Strip" or step.get("content") != " " or step.get("stop"):
            return None
        strip_left += int(step.get("start", 0))
    return Decoding(DecodingKind.BYTE_FALLBACK, tuple(replacements), strip_left)

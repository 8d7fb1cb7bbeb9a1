"""Token ids to text while they come: pieces that are final, and together are exactly the text of the whole. [no-torch]

Two things make this more than decoding each token. A character may be spread over several tokens (most emoji are), and
half of one must not be printed. And a piece's text may depend on its neighbours: SentencePiece drops the first space
of a text, and a run of its byte tokens is text only if all of it is valid UTF-8 (else every byte of the run is shown as
the replacement character), so such a run is held back until it ends.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from typing import Protocol

from streaming.text_decoding import Decoding, DecodingKind
from streaming.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class StreamingDetokenizer:
    """Turns generated ids into text, one at a time; the prompt's ids are its context and are not printed.

    `decode(prompt_ids + pushed ids)` is what the prompt contributed, then all that `push` and `finish` returned. A
    character that the prompt left incomplete is printed when it is complete.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: Iterable[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._piece = tokenizer.piece
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._text = _piecewise(tokenizer)
        for token_id in prompt_ids:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """The text that this token made final; may be empty."""
        if token_id in self._skipped:
            return ""
        piece = self._piece(token_id)
        return "" if piece is None else self._text.feed(token_id, piece)

    def finish(self) -> str:
        """What was held back, after the last token: incomplete characters appear as replacement characters."""
        return self._text.finish()


class _Piecewise(Protocol):
    """One way to put pieces together; keeps what is not final yet."""

    def feed(self, token_id: int, piece: str) -> str: ...

    def finish(self) -> str: ...


def _piecewise(tokenizer: Tokenizer) -> _Piecewise:
    decoding = tokenizer.decoding
    if decoding.kind is DecodingKind.BYTE_LEVEL:
        return _ByteLevel()
    if decoding.kind is DecodingKind.BYTE_FALLBACK:
        return _ByteFallback(decoding)
    return _Window(tokenizer)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 characters stand for themselves, the rest for 256, 257, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = byte_alphabet()


class _ByteLevel:
    """Every piece is a run of bytes; the text is their UTF-8 reading, with replacement characters where it is none."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int, piece: str) -> str:
        try:
            spelled = bytes([_BYTE_OF[character] for character in piece])
        except KeyError:  # an added token with other characters is its own text
            spelled = piece.encode("utf-8")
        return self._decoder.decode(spelled)

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _ByteFallback:
    """Pieces are text, but for byte tokens, which are read together as far as they follow one another."""

    def __init__(self, decoding: Decoding) -> None:
        self._replacements = decoding.replacements
        self._spaces_to_drop = decoding.strip_left
        self._run = bytearray()

    def feed(self, token_id: int, piece: str) -> str:
        if found := _BYTE_TOKEN.fullmatch(piece):
            self._run.append(int(found[1], 16))
            return ""
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return self._without_first_spaces(self._take_run() + piece)

    def finish(self) -> str:
        return self._without_first_spaces(self._take_run())

    def _take_run(self) -> str:
        """The text of the byte tokens since the last piece: all of it, or a replacement character for each byte."""
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _without_first_spaces(self, text: str) -> str:
        while text and self._spaces_to_drop:
            if text[0] != " ":
                self._spaces_to_drop = 0
                break
            text = text[1:]
            self._spaces_to_drop -= 1
        return text


_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class _Window:
    """For decoders that are not known piece by piece: decode the last few ids with and without the newest.

    Right for every decoder whose text of an id depends on the id before it at most (WordPiece, Metaspace, ...).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._ids: list[int] = []
        self._printed = 0  # how many of them were printed already

    def feed(self, token_id: int, piece: str) -> str:
        self._ids.append(token_id)
        waiting = len(self._ids) - self._printed
        text = self._new_text()
        # A character has four bytes at most: if as many ids did not complete it, it is a real replacement character.
        if text.endswith(REPLACEMENT) and waiting < _MOST_IDS_PER_CHARACTER:
            return ""
        self._ids, self._printed = self._ids[self._printed :], waiting
        return text

    def finish(self) -> str:
        text = self._new_text()
        self._printed = len(self._ids)
        return text

    def _new_text(self) -> str:
        before = self._decode(self._ids[: self._printed], skip_special_tokens=False)
        return self._decode(self._ids, skip_special_tokens=False)[len(before) :]


_MOST_IDS_PER_CHARACTER = 4

"""A tokenizer from a GGUF's metadata: vocabulary, merges, special tokens, as a recipe. [no-torch]

Two kinds exist for language models. "gpt2" is byte-level BPE: the file holds the merges. "llama" is SentencePiece: the
file holds a score per piece, and the merges follow from them (of two possible merges the one with the better scored
result comes first), characters without a piece are spelled in byte tokens. Keys: the GGUF specification's
"tokenizer.ggml.*".
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from streaming.errors import CheckpointError, CheckpointFormatError
from streaming.pretokenizers import Pretokenizer, find_pretokenizer
from streaming.tokenizer_config import DEFAULT_TEMPLATE, AddedTokenSpec, TokenizerSettings

_log = logging.getLogger(__name__)

SPACE = "\u2581"  # SentencePiece's visible space


class TokenType(IntEnum):
    """The values of tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class TokenizerRecipe:
    """All that a BPE tokenizer is made of; the three parts in between are entries of tokenizer.json."""

    source: str  # the file, for messages
    vocab: dict[str, int]
    merges: list[tuple[str, str]]
    normalizer: Mapping[str, Any] | None
    pre_tokenizer: Mapping[str, Any] | None
    decoder: Mapping[str, Any]
    unk_token: str | None
    byte_fallback: bool
    ignore_merges: bool
    added_tokens: tuple[AddedTokenSpec, ...]
    settings: TokenizerSettings


def gguf_recipe(metadata: Mapping[str, Any], *, source: str) -> TokenizerRecipe:
    """What the metadata of a GGUF file says about its tokenizer; `source` names the file in messages.

    Raises CheckpointError for a file without a tokenizer or with one of another kind, CheckpointFormatError for
    metadata that contradict themselves.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        return _byte_level(metadata, source)
    if model == "llama":
        return _sentencepiece(metadata, source)
    found = "has no tokenizer" if model in (None, "none", "no_vocab") else f"has a tokenizer of the kind {model!r:.60}"
    raise CheckpointError(f'{source}: {found}; known are "gpt2" and "llama"; give token ids (--ids 1,2,3) instead')


def _byte_level(metadata: Mapping[str, Any], source: str) -> TokenizerRecipe:
    """The kind "gpt2"."""
    tokens = _tokens(metadata, source)
    cut = _pretokenizer(metadata, source)
    return TokenizerRecipe(
        source=source,
        vocab={token: index for index, token in enumerate(tokens)},
        merges=_merges(metadata, source),
        normalizer=None,
        pre_tokenizer=cut.to_json(),
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        unk_token=None,
        byte_fallback=False,
        ignore_merges=cut.ignore_merges,
        added_tokens=_added_tokens(metadata, tokens, source),
        settings=_settings(metadata, tokens, source, defaults={}, add_bos=cut.add_bos),
    )


def _sentencepiece(metadata: Mapping[str, Any], source: str) -> TokenizerRecipe:
    """The kind "llama". Without merges in the file they follow from the scores."""
    tokens = [
        SPACE * len(token) if token.isspace() and not token.strip(" ") else token for token in _tokens(metadata, source)
    ]
    architecture = str(metadata.get("general.architecture", ""))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", not architecture.startswith("gemma")))
    vocab = {token: index for index, token in enumerate(tokens)}
    settings = _settings(metadata, tokens, source, defaults=_SENTENCEPIECE_IDS, add_bos=True)
    return TokenizerRecipe(
        source=source,
        vocab=vocab,
        merges=_merges_by_rank(vocab, _ranks(metadata, tokens, architecture, source), source),
        normalizer=_prefix_normalizer() if prefix and architecture == "phi3" else None,
        pre_tokenizer=None if prefix and architecture == "phi3" else _metaspace("first" if prefix else "never"),
        decoder=_sentencepiece_decoder(strip=prefix),
        unk_token=settings.special_tokens.get("unk_token"),
        byte_fallback=True,
        ignore_merges=False,
        added_tokens=_added_tokens(metadata, tokens, source),
        settings=settings,
    )


LONGEST_PIECE = 512  # characters; cutting longer ones up takes far more memory and time than the file has bytes
_SIZES = f"real vocabularies have pieces of at most {LONGEST_PIECE} characters and some two merges for each token"

# Ids of a SentencePiece vocabulary where the file does not name them.
_SENTENCEPIECE_IDS = {"unk_token": 0, "bos_token": 1, "eos_token": 2}


def _tokens(metadata: Mapping[str, Any], source: str) -> list[str]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, Sequence) or isinstance(tokens, str) or set(map(type, tokens)) != {str}:
        raise CheckpointFormatError(f"{source}: tokenizer.ggml.tokens is missing or is no list of texts")
    if "" not in tokens and _is_unicode("".join(tokens)):
        return list(tokens)
    return [token if token and _is_unicode(token) else f"[UNUSABLE_{index}]" for index, token in enumerate(tokens)]


def _is_unicode(text: str) -> bool:
    """Whether it is text: a file's bytes that are no UTF-8 arrive as lone surrogates, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _pretokenizer(metadata: Mapping[str, Any], source: str) -> Pretokenizer:
    """The one that tokenizer.ggml.pre names; "default", with a warning, when that is missing or not known."""
    name = metadata.get("tokenizer.ggml.pre")
    found = find_pretokenizer(str(name))
    if found is not None:
        return found
    what = (
        "names no pre-tokenizer (tokenizer.ggml.pre)"
        if name is None
        else f"names the pre-tokenizer {name!r:.60}, which is not known"
    )
    _log.warning(
        "%s: %s; the default is used, and some texts may be cut into other tokens than in training", source, what
    )
    fallback = find_pretokenizer("default")
    assert fallback is not None
    return fallback


def _merges(metadata: Mapping[str, Any], source: str) -> list[tuple[str, str]]:
    """tokenizer.ggml.merges: "left right" each, the most important first."""
    lines = metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, Sequence) or isinstance(lines, str):
        raise CheckpointFormatError(f"{source}: tokenizer.ggml.merges is missing, which byte-level BPE needs")
    try:
        return [(left, right) for left, right in (line.split(" ") for line in lines)]
    except (ValueError, AttributeError):
        wrong = next(line for line in lines if not isinstance(line, str) or line.count(" ") != 1)
        raise CheckpointFormatError(
            f"{source}: tokenizer.ggml.merges holds {wrong!r:.60}; two pieces with a space between were expected"
        ) from None


def _ranks(metadata: Mapping[str, Any], tokens: list[str], architecture: str, source: str) -> Sequence[float]:
    """A score per token, the best the highest. Gemma's leave out its runs of spaces: their order counts."""
    if architecture.startswith("gemma"):
        return range(0, -len(tokens), -1)
    scores = _numbers(metadata, "tokenizer.ggml.scores", source)
    if scores is None or len(scores) != len(tokens):
        found = 0 if scores is None else len(scores)
        raise CheckpointFormatError(f"{source}: tokenizer.ggml.scores has {found} entries for {len(tokens)} tokens")
    return scores


def _merges_by_rank(vocab: Mapping[str, int], scores: Sequence[float], source: str) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, the best scored piece first, the longer left part first."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocab.items():
        if len(piece) > LONGEST_PIECE:
            raise CheckpointFormatError(f"{source}: token {index} has {len(piece):,} characters; {_SIZES}")
        check_merges(len(found), tokens=len(vocab), source=source)
        for cut in range(len(piece) - 1, 0, -1):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[index], -cut, cut - len(piece), left, right))
    found.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in found]


def check_merges(count: int, *, tokens: int, source: str) -> None:
    """Raise CheckpointFormatError when a vocabulary is made to have far more merges than tokens: real ones have some
    two for each."""
    if count > 16 * tokens + (1 << 16):
        raise CheckpointFormatError(f"{source}: its {tokens:,} tokens can be put together in too many ways; {_SIZES}")


def _metaspace(prepend: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": prepend, "split": False}


def _prefix_normalizer() -> dict[str, Any]:
    """Phi-3's: a space is put before every part of the text, also where one is already."""
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    return {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, replace]}


def _sentencepiece_decoder(*, strip: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if strip:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _added_tokens(metadata: Mapping[str, Any], tokens: list[str], source: str) -> tuple[AddedTokenSpec, ...]:
    """Tokens that are matched whole: control tokens (special) and user-defined ones (part of the text)."""
    types = _numbers(metadata, "tokenizer.ggml.token_type", source)
    if types is None:
        return ()
    if len(types) != len(tokens):
        raise CheckpointFormatError(
            f"{source}: tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens"
        )
    return tuple(
        AddedTokenSpec(token, special=kind != TokenType.USER_DEFINED)
        for token, kind in zip(tokens, types, strict=True)
        if kind in _MATCHED_WHOLE
    )


_MATCHED_WHOLE = frozenset({TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED})


def _numbers(metadata: Mapping[str, Any], key: str, source: str) -> list[Any] | None:
    """An array of the metadata as a list: the parser may hand over a list or an array type with `tolist`."""
    values = metadata.get(key)
    if values is None:
        return None
    found = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(found, Sequence) or isinstance(found, str) or not set(map(type, found)) <= {int, float}:
        raise CheckpointFormatError(f"{source}: {key} is no list of numbers")
    return list(found)


def _settings(
    metadata: Mapping[str, Any], tokens: list[str], source: str, *, defaults: Mapping[str, int], add_bos: bool
) -> TokenizerSettings:
    special = {}
    for role, key in _ID_KEYS.items():
        index = token_id(metadata, f"tokenizer.ggml.{key}", source=source)
        if index is None:
            index = defaults.get(role, -1)
            index = index if index < len(tokens) else -1
        if index >= len(tokens):
            raise CheckpointFormatError(
                f"{source}: tokenizer.ggml.{key} is {index}, but there are {len(tokens)} tokens"
            )
        if index >= 0:
            special[role] = tokens[index]
    return TokenizerSettings(
        special_tokens=special,
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        chat_templates=_chat_templates(metadata),
    )


_ID_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the specification
    "pad_token": "padding_token_id",
}


def token_id(metadata: Mapping[str, Any], key: str, *, source: str) -> int | None:
    """A token id of the metadata; None where it is missing or says "none" (-1). Raises CheckpointFormatError."""
    value = metadata.get(key)
    if value in (None, -1, _NO_TOKEN):
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointFormatError(f"{source}: {key} is {value!r:.60}; a token id was expected")
    return value


_NO_TOKEN = 0xFFFFFFFF  # -1 in an unsigned field


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """tokenizer.chat_template, and named ones as tokenizer.chat_template.NAME."""
    prefix = "tokenizer.chat_template"
    keys = [
        key for key in metadata if key == prefix or key.startswith(prefix + ".")
    ]  # values are decoded when asked for
    found = {key.removeprefix(prefix).removeprefix(".") or DEFAULT_TEMPLATE: metadata[key] for key in keys}
    return {name: template for name, template in found.items() if isinstance(template, str)}

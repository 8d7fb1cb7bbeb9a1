"""Mistral's tekken.json as a tokenizer's recipe: byte-level BPE, whose merges follow from the tokens' ranks. [no-torch]

Format: mistralai/mistral-common, `tokens/tokenizers/tekken.py`. Ids: special tokens first, then the vocabulary in the
order of its ranks. As tiktoken does it, a part of the text that is a token is taken whole, and else the two neighbours
whose joined bytes have the lowest rank are joined first.
"""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streaming.checkpoint.files import read_json_object
from streaming.detokenizer import byte_alphabet
from streaming.errors import CheckpointFormatError
from streaming.gguf_tokenizer import TokenizerRecipe, check_merges
from streaming.pretokenizers import Pretokenizer
from streaming.tokenizer_config import AddedTokenSpec, TokenizerSettings, read_tokenizer_settings

_LONGEST = 512  # bytes of a token; a longer one would make the merges many more than the file has bytes
_MOST = 1 << 19  # tokens; real vocabularies have some 131,000
_ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# of files that list none (version v3): the rest are "<SPECIAL_20>", ...
_FIRST_SPECIALS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip


def tekken_recipe(path: Path) -> TokenizerRecipe:
    """What a tekken.json says about its tokenizer. Raises CheckpointFormatError, naming the file, for a broken one."""
    file = read_json_object(path)
    config = file.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("pattern"), str):
        raise CheckpointFormatError(f"{path}: has no config with a pattern")
    specials = _specials(path, file.get("special_tokens"), _count(path, config, "default_num_special_tokens"))
    ranks = _ranks(path, file.get("vocab"), _count(path, config, "default_vocab_size") - len(specials))
    characters = {byte: character for character, byte in byte_alphabet().items()}
    spelled = {token: "".join(map(characters.__getitem__, token)) for token in ranks}
    vocab = {name: index for index, name in enumerate(specials)}
    vocab |= {spelled[token]: len(specials) + rank for token, rank in ranks.items() if spelled[token] not in vocab}
    return TokenizerRecipe(
        source=str(path),
        vocab=vocab,
        merges=[(spelled[left], spelled[right]) for left, right in _merges(path, ranks)],
        normalizer=None,
        pre_tokenizer=Pretokenizer((config["pattern"],)).to_json(),
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        unk_token=None,
        byte_fallback=False,
        ignore_merges=True,
        added_tokens=tuple(AddedTokenSpec(name) for name in specials),
        settings=_settings(path.parent, specials),
    )


def _count(path: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 0 <= value <= _MOST:
        raise CheckpointFormatError(f"{path}: {key} is {value!r:.60}, not a number of tokens")
    return value


def _specials(path: Path, listed: object, count: int) -> list[str]:
    """The texts of the special tokens by their ids."""
    if listed is None:
        return [*_FIRST_SPECIALS[:count], *(f"<SPECIAL_{index}>" for index in range(len(_FIRST_SPECIALS), count))]
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed) or len(listed) > count:
        raise CheckpointFormatError(f"{path}: special_tokens is no list of at most {count} objects")
    names = [f"<SPECIAL_{index}>" for index in range(count)]
    for index, entry in enumerate(listed):
        if entry.get("rank") != index or not isinstance(entry.get("token_str"), str):
            raise CheckpointFormatError(f"{path}: special_tokens[{index}] has not the rank {index} and a token_str")
        names[index] = entry["token_str"]
    if len(set(names)) != len(names):
        raise CheckpointFormatError(f"{path}: special_tokens holds a token twice")
    return names


def _ranks(path: Path, entries: object, count: int) -> dict[bytes, int]:
    """The first `count` tokens as bytes; the others are not used by the model."""
    if not isinstance(entries, list) or not 256 <= count <= len(entries):
        found = len(entries) if isinstance(entries, list) else "no"
        raise CheckpointFormatError(f"{path}: its vocab has {found} tokens, {count} are needed, and 256 at least")
    ranks: dict[bytes, int] = {}
    for index, entry in enumerate(entries[:count]):
        token = _token(entry, index)
        if token is None or token in ranks:
            raise CheckpointFormatError(f"{path}: vocab[{index}] is no new token of rank {index}")
        ranks[token] = index
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise CheckpointFormatError(f"{path}: its vocab does not hold every byte")
    return ranks


def _token(entry: object, rank: int) -> bytes | None:
    if not isinstance(entry, dict) or entry.get("rank") != rank or not isinstance(entry.get("token_bytes"), str):
        return None
    try:
        token = b64decode(entry["token_bytes"], validate=True)
    except (Base64Error, ValueError):
        return None
    return token if 0 < len(token) <= _LONGEST else None


def _merges(path: Path, ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every way to put a token together from two others: the lowest rank first, in it the earlier parts first."""
    merges: list[tuple[bytes, bytes]] = []
    for token in ranks:
        check_merges(len(merges), tokens=len(ranks), source=str(path))
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        found = [(ranks[left], ranks[right], left, right) for left, right in cuts if left in ranks and right in ranks]
        merges += [(left, right) for _, _, left, right in sorted(found)]
    return merges


def _settings(folder: Path, specials: Sequence[str]) -> TokenizerSettings:
    """A text begins with the beginning token; a chat template may lie beside the file."""
    roles = {role: name for role, name in _ROLES.items() if name in specials}
    beside = read_tokenizer_settings(folder)
    return TokenizerSettings(special_tokens=roles, add_bos=True, add_eos=False, chat_templates=beside.chat_templates)

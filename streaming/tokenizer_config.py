"""What a model folder says about its tokenizer besides tokenizer.json: special tokens, chat templates. [no-torch]"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streaming.checkpoint.files import open_weights, read_exactly, read_json_object
from streaming.errors import CheckpointFormatError

DEFAULT_TEMPLATE = "default"
_TEMPLATE_LIMIT = 4 << 20  # bytes; real ones are below 100 kB
_TOKEN_ID = re.compile(r"[0-9]{1,9}")  # longer ones are no ids, and int() refuses those of thousands of digits


@dataclass(frozen=True)
class AddedTokenSpec:
    """A token that is matched whole in the text, before anything else; the fields are those of tokenizer.json."""

    content: str
    special: bool = True
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True)
class TokenizerSettings:
    """Special tokens by role ("bos_token": "<s>"), whether the ends are added, and the chat templates by name.

    `add_bos` and `add_eos` None: tokenizer.json's own post-processor decides. `added_tokens` are those of
    tokenizer_config.json, which older folders have there alone.
    """

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    add_bos: bool | None = None
    add_eos: bool | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    added_tokens: Mapping[int, AddedTokenSpec] = field(default_factory=dict)


def read_tokenizer_settings(folder: Path) -> TokenizerSettings:
    """Read tokenizer_config.json, special_tokens_map.json and the template files of a folder; any may be absent.

    Raises CheckpointFormatError, naming file and key, for a value of the wrong type.
    """
    path = folder / "tokenizer_config.json"
    config = read_json_object(path) if path.is_file() else {}
    return TokenizerSettings(
        special_tokens={**_special_tokens_map(folder), **_named_tokens(config, path)},
        add_bos=_flag(config, "add_bos_token", path),
        add_eos=_flag(config, "add_eos_token", path),
        chat_templates=_chat_templates(folder, config, path),
        added_tokens=_added_tokens(config, path),
    )


def _special_tokens_map(folder: Path) -> dict[str, str]:
    """special_tokens_map.json: the older place of the same names."""
    path = folder / "special_tokens_map.json"
    return _named_tokens(read_json_object(path), path) if path.is_file() else {}


def _named_tokens(entries: Mapping[str, Any], path: Path) -> dict[str, str]:
    """The entries "*_token": a text, or an object with the text in "content"; null means none."""
    found = {}
    for key, value in entries.items():
        if not key.endswith("_token") or isinstance(value, bool) or value is None:
            continue  # add_bos_token and its like are flags
        text = value.get("content") if isinstance(value, dict) else value
        if not isinstance(text, str) or not _is_unicode(text):
            raise CheckpointFormatError(f"{path}: {key} is {value!r:.60}; a text was expected")
        found[key] = text
    return found


def _flag(config: Mapping[str, Any], key: str, path: Path) -> bool | None:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointFormatError(f"{path}: {key} is {value!r:.60}; true or false was expected")
    return value


def _added_tokens(config: Mapping[str, Any], path: Path) -> dict[int, AddedTokenSpec]:
    """added_tokens_decoder: {"32000": {"content": "<|im_start|>", "special": true, ...}}."""
    entries = config.get("added_tokens_decoder") or {}
    found = {}
    for key, entry in entries.items() if isinstance(entries, dict) else [("", entries)]:
        is_id = _TOKEN_ID.fullmatch(str(key)) is not None
        text = entry.get("content") if isinstance(entry, dict) else None
        if not is_id or not isinstance(text, str) or not _is_unicode(text):
            raise CheckpointFormatError(
                f'{path}: added_tokens_decoder holds {key!r:.60}: {entry!r:.60}; an id and {{"content": TEXT}} were '
                "expected"
            )
        flags = {name: bool(entry[name]) for name in _ADDED_TOKEN_FLAGS if name in entry}
        found[int(key)] = AddedTokenSpec(text, **flags)
    return found


def _is_unicode(text: str) -> bool:
    """Whether it is text: JSON can spell lone surrogates, which no tokenizer takes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


_ADDED_TOKEN_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")


def _chat_templates(folder: Path, config: Mapping[str, Any], path: Path) -> dict[str, str]:
    """By precedence: chat_template.jinja and additional_chat_templates/, tokenizer_config.json, chat_template.json."""
    files = {p.stem: p for p in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files[DEFAULT_TEMPLATE] = folder / "chat_template.jinja"
    if files:
        return {name: _read_text(file) for name, file in files.items()}
    if config.get("chat_template") is not None:
        return _templates_value(config["chat_template"], path)
    older = folder / "chat_template.json"
    if older.is_file():
        return _templates_value(read_json_object(older).get("chat_template"), older)
    return {}


def _templates_value(value: Any, path: Path) -> dict[str, str]:
    """One template, a list of {"name", "template"}, or an object of both."""
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    if isinstance(value, dict) and all(isinstance(k, str) and isinstance(v, str) for k, v in value.items()):
        return dict(value)
    raise CheckpointFormatError(
        f'{path}: chat_template is a {type(value).__name__}; a text or a list of {{"name", "template"}} was expected'
    )


def _read_text(path: Path) -> str:
    with open_weights(path) as (file, size):
        if size > _TEMPLATE_LIMIT:
            raise CheckpointFormatError(f"{path}: {size} bytes of chat template; at most {_TEMPLATE_LIMIT} are read")
        content = read_exactly(path, file, size)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointFormatError(f"{path}: cannot be read as UTF-8 text: {error}") from error

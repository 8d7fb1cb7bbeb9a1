"""Prompts from a file: one a line of text, or JSON Lines. [no-torch]"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from streaming.errors import OptionError
from streaming.prompt import Prompt

_FIELDS = ("prompt", "ids", "max_tokens")
_MOST_NBYTES = 256 << 20  # beyond it the file is not what it is taken for
_SHOWN = 60  # characters of what was found
_MOST_DIGITS = 100
_CHARACTERS = 16  # of a text for each token of the context: of more than that a part is encoded first


@dataclass(frozen=True)
class FilePrompt:
    """One line's. `max_tokens` is None where it says nothing."""

    prompt: Prompt
    max_tokens: int | None = None


def read_prompt_file(path: Path) -> list[FilePrompt]:
    """The prompts of a `.txt` file, one a line, or of a `.jsonl` file, {"prompt": "..."} or {"ids": [...]} a line,
    each perhaps with its own "max_tokens". Empty lines at the end do not count.

    Raises OptionError with file, line and what was found.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise OptionError(f"--prompts {path}: a .txt or .jsonl file is needed, and its name ends with {path.suffix!r}")
    parse = _of_json if path.suffix == ".jsonl" else FilePrompt
    prompts = []
    for number, line in _lines(path):
        try:
            prompts.append(parse(line))
        except ValueError as error:
            raise OptionError(f"--prompts {path}, line {number}: {error}") from None
    if not prompts:
        raise OptionError(f"--prompts {path}: the file is empty")
    return prompts


def check_ids(prompts: Sequence[Prompt], path: Path, *, vocab_size: int, context_length: int) -> None:
    """Look at the prompts that are ids already, before anything is loaded. Raises OptionError with file and line for
    ids that the model does not have, and for more than its context holds beside one token of the answer."""
    for number, prompt in enumerate(prompts, start=1):
        if isinstance(prompt, str):
            continue
        where = f"--prompts {path}, line {number}"
        wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if wrong is not None:
            known = f"0 to {vocab_size - 1}"
            raise OptionError(f"{where}: token id {wrong} is not in the vocabulary of {vocab_size} ({known})")
        _check_length(len(prompt), where, context_length)


def encode_prompts(
    prompts: Sequence[Prompt], path: Path, *, encode: Callable[[str], list[int]], context_length: int
) -> list[Prompt]:
    """The prompts as token ids. A text that is much too long is refused as soon as a part of it shows that.

    Raises OptionError with file and line for a text that the context does not hold beside one token of the answer.
    """
    found: list[Prompt] = []
    for number, prompt in enumerate(prompts, start=1):
        where = f"--prompts {path}, line {number}"
        found.append(_encoded(prompt, where, encode, context_length) if isinstance(prompt, str) else prompt)
    return found


def _encoded(text: str, where: str, encode: Callable[[str], list[int]], context_length: int) -> list[int]:
    """A longer text hardly changes how its beginning is cut into tokens; but no text is refused for its characters, of
    which one token may stand for any number, nor before the beginning has twice what is allowed."""
    part = _CHARACTERS * context_length
    while part < len(text):
        if len(encode(text[:part])) > 2 * context_length:
            _check_length(2 * context_length, where, context_length, least="more than ")
        part *= 2
    ids = encode(text)
    if not ids:
        raise OptionError(f"{where}: the prompt has no token: at least one is needed")
    _check_length(len(ids), where, context_length)
    return ids


def _check_length(count: int, where: str, context_length: int, *, least: str = "") -> None:
    if count >= context_length:
        raise OptionError(
            f"{where}: the prompt has {least}{count} tokens, and the context holds {context_length} with the answer: "
            "shorten it or raise --max-model-len"
        )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbers and text."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_NBYTES + 1)
    except OSError as error:
        raise OptionError(f"--prompts {path}: {error.strerror}") from None
    if len(data) > _MOST_NBYTES:
        raise OptionError(f"--prompts {path}: more than {_MOST_NBYTES >> 20} MiB are no list of prompts")
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise OptionError(f"--prompts {path}, line {number}: is not UTF-8 text ({error.reason})") from None
        if not text.strip():
            raise OptionError(f"--prompts {path}, line {number}: is empty, and a prompt is needed on every line")
        yield number, text


def _of_json(line: str) -> FilePrompt:
    """Raises ValueError for what is no prompt."""
    try:
        value = json.loads(line, parse_int=_whole)
    except OverflowError as error:
        raise ValueError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON ({error}): {_short(line)}") from None
    if not isinstance(value, dict):
        raise ValueError(f'an object such as {{"prompt": "..."}} is needed, found {_short(line)}')
    if unknown := [name for name in value if name not in _FIELDS]:
        raise ValueError(f"{unknown[0]!r} is not one of {', '.join(_FIELDS)}")
    if ("prompt" in value) == ("ids" in value):
        raise ValueError(f"one of prompt and ids is needed, found {_short(line)}")
    return FilePrompt(_prompt(value), _max_tokens(value.get("max_tokens")))


def _whole(digits: str) -> int:
    """Raises OverflowError for what is no number of this file, and takes long to make."""
    if len(digits) > _MOST_DIGITS:
        raise OverflowError(f"holds a number of {len(digits)} digits, which is neither a token id nor a length")
    return int(digits)


def _prompt(value: dict[str, object]) -> Prompt:
    if "prompt" in value:
        text = value["prompt"]
        if not isinstance(text, str) or not text:
            raise ValueError(f"prompt is {_short(repr(text))}: a text that is not empty is needed")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"prompt holds half a character: {_short(repr(text))}")
        return text
    ids = value["ids"]
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise ValueError(f"ids is {_short(repr(ids))}: a list of token ids is needed, such as [1, 2, 3]")
    return ids


def _max_tokens(value: object) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise ValueError(f"max_tokens is {_short(repr(value))}: a whole number of at least 1 is needed")
    return value


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

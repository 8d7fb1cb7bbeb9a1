"""Patterns that name modules, as quantization files and the configurations of quantized checkpoints write them. Pure.

A pattern is one of

- `re:` and a regular expression, which matches from the name's beginning (`re.match`, as compressed-tensors does);
- a name with `*`, `?` or `[...]` in it: those wildcards, over the whole name (as ModelOpt does);
- a class, such as "Linear", where the module is of it;
- otherwise a run of whole modules, anywhere in the name: "mlp.gate" is in "model.layers.1.mlp.gate" and not in
  "model.layers.1.mlp.gate_proj", "model.layers.1" not in "model.layers.10.mlp". A name that begins with the words of a
  wrapper ("language_model.", "module.", ...) is that name without them too.

Patterns may come from a stranger's file, so a regular expression that could take for ever is refused: one that repeats
a group or a reference, or repeats too often.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from functools import lru_cache
from math import factorial

from quant.errors import QuantError

REGEX = "re:"
WRAPPERS = frozenset({"model", "language_model", "text_model", "module", "_orig_mod", "base_model"})
LONGEST = 512  # characters of a pattern
_MOST_REPEATS = 4  # *, + and {...} of one expression: the time grows with the name's length to this power
_LONGEST_NAME = 200  # that a regular expression is held against
_MOST_OPTIONAL = 8  # ? of one expression: the time doubles with each
_MOST_STARS = 8
_USUAL_NAME = 50  # characters
_MOST_STEPS = 4_000_000  # in which the expressions of one list are held against a usual name, by a bound that is crude
_OF_ANY = 1000  # steps that even an expression counts for that repeats nothing: it is compiled
_KEPT = 4096  # compiled expressions: a list is gone through once for every module
_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?[^)]|[*+?{][?+]?|.", re.DOTALL)


def matches(pattern: str, module_names: Iterable[str], *, classes: Collection[str] = ()) -> bool:
    """Whether the pattern names the module, which has these names (as the checkpoint, as the runtime calls it) and is
    of these classes. QuantError for a pattern that is none."""
    check_pattern(pattern)
    if pattern in classes:
        return True
    if pattern.startswith(REGEX):
        expression = _compiled(pattern)
        return any(expression.match(_short(name)) for name in module_names)
    if any(mark in pattern for mark in "*?["):
        return any(fnmatchcase(name, pattern) for name in module_names)
    return any(_is_run(words, name.split(".")) for name in module_names for words in [pattern.split(".")])


def any_matches(patterns: Iterable[str], module: str) -> bool:
    """Whether one of the patterns names the module, which goes by one name."""
    return any(matches(pattern, (module,)) for pattern in patterns)


def check_pattern(pattern: str) -> None:
    """Raise QuantError for a pattern that is empty, too long, no expression, or one that could take for ever."""
    if not pattern.strip(".") or pattern == REGEX:
        raise QuantError(f"pattern {pattern!r}: names nothing")
    if len(pattern) > LONGEST:
        raise QuantError(f"pattern {pattern[:60]!r}...: has {len(pattern)} characters; at most {LONGEST} are taken")
    if pattern.startswith(REGEX):
        _compiled(pattern)
    elif pattern.count("*") > _MOST_STARS:
        raise QuantError(f"pattern {pattern[:60]!r}: has more than {_MOST_STARS} stars")


def check_patterns(patterns: Iterable[str]) -> tuple[str, ...]:
    """The patterns of one list. Raises QuantError for one of them, or for all where they could take for ever together:
    each is held against every module."""
    found = tuple(patterns)
    steps = 0
    for pattern in found:
        check_pattern(pattern)
        if pattern.startswith(REGEX):
            repeats, _ = _counted(pattern.removeprefix(REGEX))
            steps += max(_OF_ANY, _USUAL_NAME**repeats // factorial(repeats))
            if steps > _MOST_STEPS:
                raise QuantError(
                    f"{len(found)} patterns: their expressions, such as {pattern[:60]!r}, are too many or repeat too "
                    "often to be held against every module"
                )
    return found


def _is_run(words: list[str], name: list[str]) -> bool:
    """Whether the words are a run of the name's; without their wrappers' words, that they begin it or all that follows
    its own wrappers' words."""
    if any(name[start : start + len(words)] == words for start in range(len(name) - len(words) + 1)):
        return True
    bare, inner = _unwrapped(words), _unwrapped(name)
    return len(bare) < len(words) and bool(bare) and inner[: len(bare)] == bare


def _unwrapped(words: list[str]) -> list[str]:
    first = next((index for index, word in enumerate(words) if word not in WRAPPERS), len(words))
    return words[first:]


@lru_cache(maxsize=_KEPT)
def _compiled(pattern: str) -> re.Pattern[str]:
    expression = pattern.removeprefix(REGEX)
    if fault := _slow(expression):
        raise QuantError(f"pattern {pattern[:80]!r}: {fault}; write it without")
    try:
        return re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise QuantError(f"pattern {pattern[:80]!r}: is no regular expression ({str(error)[:80]})") from None


def _short(name: str) -> str:
    if len(name) > _LONGEST_NAME:
        raise QuantError(
            f"module {name[:60]!r}...: its name has {len(name)} characters; a regular expression is held against names "
            f"of at most {_LONGEST_NAME}"
        )
    return name


def _slow(expression: str) -> str | None:
    """What about the expression could take for ever, in words."""
    before = ""
    for token in _TOKENS.findall(expression):
        kind = _repetition(token)
        if kind and kind != "?" and (before == ")" or re.fullmatch(r"\\[1-9]", before)):
            return f"repeats a group ({before}{kind})"
        before = token
    repeats, optional = _counted(expression)
    if repeats > _MOST_REPEATS:
        return f"repeats {repeats} times, more than {_MOST_REPEATS}"
    if optional > _MOST_OPTIONAL:
        return f"has {optional} optional parts, more than {_MOST_OPTIONAL}"
    return None


def _counted(expression: str) -> tuple[int, int]:
    """How often the expression repeats something, and how many parts of it are optional."""
    kinds = [kind for kind in map(_repetition, _TOKENS.findall(expression)) if kind]
    return len(kinds) - kinds.count("?"), kinds.count("?")


def _repetition(token: str) -> str:
    return token[0] if len(token) <= 2 and token[0] in "*+?{" else ""

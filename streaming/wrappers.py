"""What wrappers do to tensor names (`module.`, `_orig_mod.`, a doubled or missing `model.`), undone. [no-torch]

A checkpoint saved from inside a compiler's, a trainer's or a vision model's wrapper has its words in every name. Which
reading is right is decided by the one who asks: it is the one under which *all* names match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from streaming.checkpoint.tensors import TensorInfo

Tensors = Mapping[str, TensorInfo]
_Rename = Callable[[str], str]
TRAINING_WORDS = ("_orig_mod", "module")  # of torch.compile, and of data-parallel training
_WORDS = (*TRAINING_WORDS, "language_model")
_DEPTH = 3  # wrappers around wrappers
_HEAD = "lm_head."


def unwrappings(tensors: Tensors) -> Iterator[tuple[str, Tensors]]:
    """Other readings of the names, the simplest first: what was changed, in words, and the tensors by their new names.

    Readings in which two tensors would bear one name are left out.
    """
    seen = {frozenset(tensors)}
    level: list[tuple[tuple[str, ...], Tensors]] = [((), tensors)]
    for _ in range(_DEPTH):
        following: list[tuple[tuple[str, ...], Tensors]] = []
        for done, names in level:
            for words, rename in _changes(names):
                renamed = {rename(name): info for name, info in names.items()}
                if len(renamed) == len(names) and (key := frozenset(renamed)) not in seen:
                    seen.add(key)
                    following.append(((*done, words), renamed))
        yield from ((" and ".join(done), names) for done, names in following)
        level = following


def _changes(names: Iterable[str]) -> Iterator[tuple[str, _Rename]]:
    """The ways to take back what one wrapper did, those that change any of the names."""
    for word in _WORDS:
        if any(name.startswith(f"{word}.") or f".{word}." in name for name in names):
            yield f"{f'{word}.'!r} stands", partial(_without, word)
    if all(name.startswith("model.") for name in names):
        yield "'model.' stands", lambda name: name.removeprefix("model.")
    if any(name.startswith("model.model.") for name in names):
        yield "'model.' stands twice", lambda name: name.removeprefix("model.") if "model.model." in name else name
    if not any(name.startswith("model.") for name in names):
        yield "'model.' is missing", lambda name: name if name.startswith(_HEAD) else f"model.{name}"


def _without(word: str, name: str) -> str:
    """The name without the first module that is called so."""
    return name.removeprefix(f"{word}.") if name.startswith(f"{word}.") else name.replace(f".{word}.", ".", 1)

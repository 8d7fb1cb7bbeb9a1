"""The text that quality is measured on, as runs of token ids that are each read by themselves. [no-torch]"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streaming.errors import OptionError
from streaming.tokenizer import Tokenizer


@dataclass(frozen=True)
class Run:
    """Token ids that one context holds; those from `first` on are predicted by what stands before them."""

    ids: tuple[int, ...]
    first: int

    @property
    def targets(self) -> tuple[int, ...]:
        """The tokens that come, of the positions [first - 1, len(ids) - 1)."""
        return self.ids[self.first :]


def cut_into_runs(ids: Sequence[int], *, prefix: Sequence[int], length: int) -> tuple[Run, ...]:
    """`ids` in runs of at most `length` tokens, each behind `prefix` (what a tokenizer puts before every text).

    Without a prefix nothing predicts a run's first token. Raises OptionError where nothing is predicted at all.
    """
    room = length - len(prefix)
    if room < 1 or length < 2:
        raise OptionError(f"--max-model-len {length} is too short: nothing can be predicted in so few tokens")
    first = max(1, len(prefix))
    pieces = [(*prefix, *ids[start : start + room]) for start in range(0, len(ids), room)]
    runs = tuple(Run(piece, first) for piece in pieces if len(piece) > first)
    if not runs:
        raise OptionError(
            f"the text is too short: it has {len(ids)} token{'s'[: len(ids) != 1]}, and none is predicted"
        )
    return runs


def encode_text(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """The text's own ids, and those that the tokenizer puts before every text."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    framed = tokenizer.encode(text, add_special_tokens=True)
    for start in range(len(framed) - len(ids) + 1):
        if framed[start : start + len(ids)] == ids:
            return ids, framed[:start]
    return framed, []  # the frame changes how the text is cut: taken as it is

"""Several tokens from one pass: a proposer guesses what follows, and one step of the model checks all guesses.

The model computes the last token and the proposed ones together. Row by row the sampler chooses from their logits, as
it would have without proposals; while its choice is the next proposed token, the next row is right too, and its
choice counts. Then the KV cache is cut back to what was right. So the tokens are those of plain decoding, as long as
the choice is deterministic (temperature 0) and a row's logits do not depend on the rows that are computed with it. In
float32 no greedy choice was seen to differ. In fewer bits the products of one row and of several round differently:
the answer may differ from plain greedy's first where that has two tokens nearly equal, see `tie_tolerance`.

Leviathan et al. 2023, arXiv:2211.17192; prompt lookup after Saxena 2023, "Prompt Lookup Decoding".
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

LONGEST_PATTERN = 3  # tokens that are looked up, then fewer down to one
MOST_PROPOSED = 512  # tokens that one step checks, of all its sequences
_NBYTES = 4  # of a token id, packed


@dataclass(frozen=True)
class Wanted:
    """What may follow `tokens` (prompt and answer) of sequence `index`: at most `most` tokens. `room`: the most tokens
    that the sequence will ever have."""

    index: int
    tokens: Sequence[int]
    most: int
    room: int


class Proposer(Protocol):
    """Guesses tokens. Used from the forward thread alone."""

    def begin(self) -> None:
        """The first token is there: what is needed for proposals may be brought."""

    def propose(self, wanted: Sequence[Wanted], *, stop: Callable[[], None]) -> Sequence[Sequence[int]]:
        """For each sequence the tokens that may follow, perhaps none. `stop` raises to cancel."""

    def forget(self, index: int) -> None:
        """The sequence has ended."""


class PromptLookup:
    """Proposes what followed the last time: the latest earlier place of the last 3 tokens in prompt and answer, else of
    the last 2, else of the last one. Where that reaches the end of the text, it goes round: a text that repeats itself
    is taken to go on so."""

    def __init__(self) -> None:
        self._packed: dict[int, bytearray] = {}

    def begin(self) -> None:
        """Nothing is needed."""

    def propose(self, wanted: Sequence[Wanted], *, stop: Callable[[], None]) -> Sequence[Sequence[int]]:
        """See Proposer."""
        return [self._proposed(one) for one in wanted]

    def forget(self, index: int) -> None:
        """See Proposer."""
        self._packed.pop(index, None)

    def _proposed(self, wanted: Wanted) -> list[int]:
        packed = self._packed.setdefault(wanted.index, bytearray())
        packed += array("i", wanted.tokens[len(packed) // _NBYTES :]).tobytes()
        start = _continuation(packed)
        if start is None:
            return []
        period = len(wanted.tokens) - start
        return [wanted.tokens[start + place % period] for place in range(wanted.most)]


def _continuation(packed: bytearray) -> int | None:
    """The place of the token behind the latest earlier occurrence of the last tokens."""
    count = len(packed) // _NBYTES
    for length in range(min(LONGEST_PATTERN, count - 1), 0, -1):
        pattern, end = bytes(packed[-length * _NBYTES :]), len(packed) - _NBYTES
        while (at := packed.rfind(pattern, 0, end)) >= 0:
            if at % _NBYTES == 0:
                return at // _NBYTES + length
            end = at + len(pattern) - 1  # found across token ids: further to the front
    return None


def shared_out(wanted: Sequence[int]) -> list[int]:
    """So many proposals for each sequence that a step's rows stay bounded: the first have what they want."""
    left, found = MOST_PROPOSED, []
    for most in wanted:
        found.append(max(0, min(most, left)))
        left -= found[-1]
    return found


def tie_tolerance(logits: torch.Tensor, dtype: torch.dtype) -> float:
    """How near plain greedy's two highest logits [V] must lie where an answer with proposals differs first: 4 units of
    the dtype at the largest magnitude of the row (float32: 0, there is no difference)."""
    if dtype == torch.float32:
        return 0.0
    return 4 * torch.finfo(dtype).eps * float(logits.abs().max())

"""Which answers are computed together: more requests than memory or one step has room for take turns.

New ones are admitted as others end, in the order in which they were asked, each before its KV cache is allocated. A
prompt is computed in one step, whole: products of other numbers of rows may have other last bits, so cutting a prompt
changes its keys (in bfloat16 a quarter to a half of the numbers of a prompt of 73 tokens, measured; in float32 none or
half of them, by the place of the cut). What is bounded is how many prompts begin in one step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from layers.kv_cache import KVCache
from streaming.answers import Answer, Request, begin_answer
from streaming.tokenizer import Tokenizer

MOST_ANSWERS = 256  # of one step: each takes a row of logits
PROMPT_TOKENS = 2048  # of prompts that begin in one step; a single prompt may have more


@dataclass(frozen=True)
class Caches:
    """KV caches of a model: `new(tokens)` makes one or raises BudgetError, `fits(tokens)` says which it would be."""

    new: Callable[[int], KVCache]
    fits: Callable[[int], bool]


@dataclass
class Waves:
    """The requests that wait and the answers that are computed, in the order of the requests."""

    waiting: deque[tuple[int, Request]]
    tokenizer: Tokenizer | None
    caches: Caches
    active: list[Answer] = field(default_factory=list)

    @classmethod
    def of(cls, requests: Sequence[Request], *, tokenizer: Tokenizer | None, caches: Caches) -> Waves:
        """All of them waiting."""
        return cls(deque(enumerate(requests)), tokenizer, caches)

    def admit(self) -> None:
        """Begin as many answers as there is room for; at least one where none is active.

        Raises BudgetError for one that has no room by itself.
        """
        begun = 0  # tokens of prompts
        while self.waiting and len(self.active) < MOST_ANSWERS:
            index, request = self.waiting[0]
            if begun and begun + len(request.prompt_ids) > PROMPT_TOKENS:
                return
            if self.active and not self.caches.fits(request.cache_tokens):
                return
            cache = self.caches.new(request.cache_tokens)
            self.waiting.popleft()
            self.active.append(begin_answer(index, request, tokenizer=self.tokenizer, cache=cache))
            begun += len(request.prompt_ids)

    def drop_finished(self) -> None:
        """Let go of the answers that have ended, and with them of their caches."""
        self.active = [answer for answer in self.active if answer.finish_reason is None]

"""Answers on their way: what is asked, what comes of it piece by piece, and where one ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layers.sampler import Sampler
from layers.sampling_params import SamplingParams
from streaming.detokenizer import StreamingDetokenizer
from streaming.stopping import StopChecker
from streaming.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

    from layers.kv_cache import KVCache


@dataclass(frozen=True)
class Request:
    """One prompt, as token ids; its answer ends at any of `stop_ids`."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()

    @property
    def cache_tokens(self) -> int:
        """Tokens that its KV cache must hold."""
        return len(self.prompt_ids) + self.params.max_tokens


@dataclass(frozen=True)
class Piece:
    """Something new of answer `index`: a token, and the text that has become final with it ("" when none has)."""

    index: int
    token_id: int
    text: str


@dataclass(frozen=True)
class Completion:
    """A finished answer. `finish_reason`: "length", "stop" (a stop id or string). `token_ids` include the stop id."""

    index: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str


@dataclass
class Answer:
    """One sequence on its way. `tokens`: the prompt's and the answer's."""

    index: int
    request: Request
    cache: KVCache
    sampler: Sampler
    stopping: StopChecker
    detokenizer: StreamingDetokenizer | None
    tokens: list[int]
    text: str = ""
    finish_reason: str | None = None

    @property
    def count(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def wanted_proposals(self) -> int:
        """Proposed tokens that the next step may check: behind the last token of the answer none is of use."""
        if not self.count:
            return 0  # the first token is not kept waiting for more than it needs
        return min(self.request.params.speculate, self.request.params.max_tokens - self.count - 1)

    def take(self, logits: torch.Tensor) -> Iterator[Piece]:
        """Choose the next token by its logits [V] and add it: the text that has become final with it, and what was held
        back where the answer ends here."""
        token = self.sampler(logits, previous=self.tokens)
        self.tokens.append(token)
        yield self._added(token)
        if self.finish_reason is not None and (rest := self._rest()):
            yield Piece(self.index, token, rest)

    def _added(self, token: int) -> Piece:
        if self.stopping.check_id(token):
            self.finish_reason = "stop"
            return Piece(self.index, token, "")
        text = self._stop_strings(self.detokenizer.push(token)) if self.detokenizer else ""
        if self.finish_reason is None and self.count >= self.request.params.max_tokens:
            self.finish_reason = "length"
        return Piece(self.index, token, text)

    def _rest(self) -> str:
        """What was held back, once the answer has ended."""
        if self.detokenizer is None or isinstance(self.stopping.matched, str):
            return ""
        text = self.stopping.push(self.detokenizer.finish())
        if not isinstance(self.stopping.matched, str):
            text += self.stopping.finish()
        self.text += text
        return text

    def _stop_strings(self, new: str) -> str:
        text = self.stopping.push(new)
        self.text += text
        if self.stopping.stopped:
            self.finish_reason = "stop"
        return text

    def completion(self) -> Completion:
        """The answer, which has ended."""
        prompt = self.request.prompt_ids
        text = self.text if self.detokenizer else None
        return Completion(self.index, prompt, tuple(self.tokens[len(prompt) :]), text, self.finish_reason or "length")


def begin_answer(index: int, request: Request, *, tokenizer: Tokenizer | None, cache: KVCache) -> Answer:
    """An answer without a token yet. Without a tokenizer it will have no text."""
    params = request.params
    detokenizer = StreamingDetokenizer(tokenizer, request.prompt_ids) if tokenizer is not None else None
    stopping = StopChecker(stop_ids=request.stop_ids, stop_strings=params.stop)
    return Answer(index, request, cache, Sampler(params), stopping, detokenizer, list(request.prompt_ids))

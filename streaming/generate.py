"""Generation: prompts in, tokens and text out, one step of the whole batch after the other; in the forward thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from layers.batch import make_batch
from layers.kv_cache import KVCache
from layers.sampler import Sampler
from layers.sampling_params import SamplingParams
from quant.kernels import KernelMode
from streaming.detokenizer import StreamingDetokenizer
from streaming.packing import pack_layers
from streaming.runner import ModelRunner
from streaming.stopping import StopChecker
from streaming.tokenizer import Tokenizer


@dataclass(frozen=True)
class Request:
    """One prompt, as token ids; its answer ends at any of `stop_ids`."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()


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
class Timing:
    """Moments of one generation on the monotonic clock."""

    begun_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    decoded: int = 0  # tokens after the first step
    packing_s: float = 0.0  # spent behind the first step on packed weights


@dataclass
class _Answer:
    """One sequence on its way."""

    index: int
    request: Request
    cache: KVCache
    sampler: Sampler
    stopping: StopChecker
    detokenizer: StreamingDetokenizer | None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None

    def take(self, token: int) -> Piece:
        """Add a token: the text that has become final, and whether the answer ends here."""
        self.token_ids.append(token)
        if self.stopping.check_id(token):
            self.finish_reason = "stop"
            return Piece(self.index, token, "")
        text = self._stop_strings(self.detokenizer.push(token)) if self.detokenizer else ""
        if self.finish_reason is None and len(self.token_ids) >= self.request.params.max_tokens:
            self.finish_reason = "length"
        return Piece(self.index, token, text)

    def rest(self) -> str:
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
        text = self.text if self.detokenizer else None
        return Completion(
            self.index, self.request.prompt_ids, tuple(self.token_ids), text, self.finish_reason or "length"
        )


def generate(
    runner: ModelRunner,
    requests: Sequence[Request],
    *,
    tokenizer: Tokenizer | None,
    new_cache: Callable[[int], KVCache],
    stop: Callable[[], None],
    timing: Timing,
) -> Iterator[Piece | Completion]:
    """All requests at once: they share each layer's arrival, and every step after. Yields pieces as they come.

    `new_cache` makes a cache for so many tokens. Without a tokenizer pieces have no text.
    """
    timing.begun_s = time.monotonic()
    answers = [_begin(index, request, tokenizer, new_cache) for index, request in enumerate(requests)]
    inputs = [list(request.prompt_ids) for request in requests]
    active, packed = answers, False
    while active:
        logits = _step(runner, active, inputs, stop, packed=packed)
        for row, answer in enumerate(active):
            token = answer.sampler(logits[row], previous=(*answer.request.prompt_ids, *answer.token_ids))
            _note(timing, first=not answer.token_ids)
            yield answer.take(token)
            if answer.finish_reason is not None:
                if rest := answer.rest():
                    yield Piece(answer.index, token, rest)
                yield answer.completion()
        active = [answer for answer in active if answer.finish_reason is None]
        inputs = [[answer.token_ids[-1]] for answer in active]
        if active and not packed and runner.kernels.mode is KernelMode.FAST:
            begun_s, packed = time.monotonic(), True  # always behind the first step: bits must not depend on the load
            pack_layers(runner, stop=stop)
            timing.packing_s = time.monotonic() - begun_s


def _begin(index: int, request: Request, tokenizer: Tokenizer | None, new_cache: Callable[[int], KVCache]) -> _Answer:
    params = request.params
    cache = new_cache(len(request.prompt_ids) + params.max_tokens)
    detokenizer = StreamingDetokenizer(tokenizer, request.prompt_ids) if tokenizer is not None else None
    stopping = StopChecker(stop_ids=request.stop_ids, stop_strings=params.stop)
    return _Answer(index, request, cache, Sampler(params), stopping, detokenizer)


def _step(
    runner: ModelRunner,
    active: Sequence[_Answer],
    inputs: Sequence[Sequence[int]],
    stop: Callable[[], None],
    *,
    packed: bool,
) -> torch.Tensor:
    new = [(ids, answer.cache) for ids, answer in zip(inputs, active, strict=True)]
    batch = make_batch(new, vocab_size=runner.model.config.vocab_size, device=runner.device.torch_device)
    return runner.forward(batch, batch.last_rows, stop=stop, packed=packed)


def _note(timing: Timing, *, first: bool) -> None:
    timing.last_token_s = time.monotonic()
    if timing.first_token_s == 0.0:
        timing.first_token_s = timing.last_token_s
    if not first:
        timing.decoded += 1

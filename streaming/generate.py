"""Generation: prompts in, tokens and text out, one step of the whole batch after the other; in the forward thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from layers.batch import make_batch
from quant.kernels import KernelMode
from streaming.answers import Answer, Completion, Piece, Request
from streaming.packing import pack_layers
from streaming.runner import ModelRunner
from streaming.speculation import Proposer, Wanted, shared_out
from streaming.tokenizer import Tokenizer
from streaming.waves import Caches, Waves


@dataclass
class Timing:
    """Moments of one generation on the monotonic clock, and what it has counted."""

    begun_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    decoded: int = 0  # tokens that were not the first of their answer
    packing_s: float = 0.0  # spent behind the first step on packed weights
    tokens: int = 0
    passes: int = 0  # steps of the model
    proposed: int = 0  # tokens that were guessed and checked
    accepted: int = 0  # those of them that were right

    def note_token(self, *, first: bool) -> None:
        """A token has been chosen."""
        self.last_token_s = time.monotonic()
        self.first_token_s = self.first_token_s or self.last_token_s
        self.tokens += 1
        if not first:
            self.decoded += 1


def generate(
    runner: ModelRunner,
    requests: Sequence[Request],
    *,
    tokenizer: Tokenizer | None,
    caches: Caches,
    proposer: Proposer,
    stop: Callable[[], None],
    timing: Timing,
) -> Iterator[Piece | Completion]:
    """All requests that have room at once: they share each layer's arrival, and every step after; the others follow as
    answers end. Yields pieces as they come. Without a tokenizer pieces have no text.

    Tokens of `proposer` are checked where a request's params say `speculate`. Raises BudgetError for a request whose
    cache has no room by itself.
    """
    timing.begun_s = time.monotonic()
    waves, packed = Waves.of(requests, tokenizer=tokenizer, caches=caches), False
    waves.admit()
    while waves.active:
        yield from _round(runner, waves.active, proposer, stop, timing, packed=packed)
        waves.drop_finished()
        if timing.passes == 1 and any(answer.request.params.speculate for answer in waves.active):
            proposer.begin()
        if waves.active and not packed and runner.kernels.mode is KernelMode.FAST:
            begun_s, packed = time.monotonic(), True  # always behind the first step: bits must not depend on the load
            pack_layers(runner, stop=stop)
            timing.packing_s = time.monotonic() - begun_s
        waves.admit()


def _round(
    runner: ModelRunner,
    active: Sequence[Answer],
    proposer: Proposer,
    stop: Callable[[], None],
    timing: Timing,
    *,
    packed: bool,
) -> Iterator[Piece | Completion]:
    """One step of the model, and what comes of it for each answer."""
    proposals = _proposals(active, proposer, stop)
    logits = _step(runner, active, proposals, stop, packed=packed)
    timing.passes += 1
    for answer, proposed, rows in zip(active, proposals, logits, strict=True):
        yield from _accept(answer, proposed, rows, timing)
        if answer.finish_reason is not None:
            proposer.forget(answer.index)
            yield answer.completion()


def _proposals(active: Sequence[Answer], proposer: Proposer, stop: Callable[[], None]) -> Sequence[Sequence[int]]:
    """Tokens that may follow, for each answer."""
    counts = shared_out([answer.wanted_proposals for answer in active])
    wanted = [
        Wanted(answer.index, answer.tokens, most, answer.request.cache_tokens)
        for answer, most in zip(active, counts, strict=True)
        if most
    ]
    made = iter(proposer.propose(wanted, stop=stop) if wanted else ())
    return [next(made) if most else () for most in counts]


def _step(
    runner: ModelRunner,
    active: Sequence[Answer],
    proposals: Sequence[Sequence[int]],
    stop: Callable[[], None],
    *,
    packed: bool,
) -> Sequence[torch.Tensor]:
    """For each answer the logits [1 + proposals, V] behind its last token and behind each proposed one."""
    new = [
        ((*answer.tokens[answer.cache.length :], *proposed), answer.cache)
        for answer, proposed in zip(active, proposals, strict=True)
    ]
    batch = make_batch(new, vocab_size=runner.model.config.vocab_size, device=runner.device.torch_device)
    counts = [1 + len(proposed) for proposed in proposals]
    logits = runner.forward(batch, batch.last(counts), stop=stop, packed=packed)
    found: Sequence[torch.Tensor] = logits.split(counts)
    return found


def _accept(answer: Answer, proposed: Sequence[int], logits: torch.Tensor, timing: Timing) -> Iterator[Piece]:
    """Take the model's own choices [1 + proposals, V] as long as the proposals were those; forget the others."""
    right = answer.cache.length - len(proposed)  # tokens in the cache that are sure
    timing.proposed += len(proposed)
    for place, row in enumerate(logits):
        first = not answer.count
        pieces = answer.take(row)
        piece = next(pieces)
        timing.note_token(first=first)
        yield piece
        yield from pieces
        agreed = place < len(proposed) and piece.token_id == proposed[place]
        timing.accepted += agreed
        if answer.finish_reason is not None or not agreed:
            break
    answer.cache.truncate(right + place)

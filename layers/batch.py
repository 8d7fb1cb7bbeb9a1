"""One step's input: the new tokens of several sequences one after the other, each with its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layers.kv_cache import KVCache


@dataclass(frozen=True)
class BatchSequence:
    """The rows [start, stop) of a batch, which continue the sequence in `cache`."""

    start: int
    stop: int
    cache: KVCache

    @property
    def length(self) -> int:
        """Tokens of the sequence once this step is done."""
        return self.cache.length + self.stop - self.start


@dataclass(frozen=True)
class Batch:
    """token_ids and positions, int64 [T]: linear layers see T rows, attention one sequence at a time."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    sequences: tuple[BatchSequence, ...]

    @property
    def last_rows(self) -> tuple[int, ...]:
        """The row of each sequence's last token: where its next token is predicted."""
        return tuple(sequence.stop - 1 for sequence in self.sequences)

    def last(self, counts: Sequence[int]) -> tuple[int, ...]:
        """The rows of each sequence's last `counts` tokens."""
        pairs = zip(self.sequences, counts, strict=True)
        return tuple(row for sequence, count in pairs for row in range(sequence.stop - count, sequence.stop))

    def advance(self) -> None:
        """Count this step's tokens in the caches, after every layer has run."""
        for sequence in self.sequences:
            sequence.cache.advance(sequence.stop - sequence.start)


def make_batch(
    new_tokens: Sequence[tuple[Sequence[int], KVCache]], *, vocab_size: int, device: str | torch.device = "cpu"
) -> Batch:
    """A batch of each sequence's new token ids, which continue its cache.

    Raises ValueError for an id outside the vocabulary, for a sequence without tokens, and for one that does not fit
    into its cache.
    """
    ids: list[int] = []
    positions: list[int] = []
    sequences = []
    for tokens, cache in new_tokens:
        _check(tokens, cache, vocab_size)
        sequences.append(BatchSequence(len(ids), len(ids) + len(tokens), cache))
        ids.extend(tokens)
        positions.extend(range(cache.length, cache.length + len(tokens)))
    return Batch(_int64(ids, device), _int64(positions, device), tuple(sequences))


def _int64(values: list[int], device: str | torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _check(tokens: Sequence[int], cache: KVCache, vocab_size: int) -> None:
    if not tokens:
        raise ValueError("a sequence of the batch has no new tokens; at least one is needed")
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"token id {wrong} is outside the vocabulary of {vocab_size} (0 to {vocab_size - 1})")
    if cache.length + len(tokens) > cache.capacity:
        raise ValueError(
            f"{len(tokens)} new tokens after {cache.length} do not fit into a KV cache of {cache.capacity} tokens"
        )

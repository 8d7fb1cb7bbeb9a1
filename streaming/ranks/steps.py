"""What rank 0 tells the others of a step of the model, and which part of a step a rank computes. [no-torch]

Sequences are known by the numbers of their caches. Where several groups of ranks hold the same dense layers (replicas),
a sequence belongs to the replica (number mod replicas).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from streaming.errors import WorkerError
from streaming.ranks.channel import Message

CACHE, STEP, PACK = "cache", "step", "pack"  # kinds of messages; a follower handles them in the order of their coming


@dataclass(frozen=True)
class NewCache:
    """A cache for so many tokens, to be made by every rank whose replica the sequence is of. dropped: caches that are
    no longer needed, given up before this one is made."""

    number: int
    max_tokens: int
    dropped: tuple[int, ...] = ()

    def message(self) -> Message:
        """As it travels."""
        return {"kind": CACHE, "number": self.number, "max_tokens": self.max_tokens, "dropped": self.dropped}

    @classmethod
    def of(cls, message: Message) -> NewCache:
        """What a message says."""
        return cls(int(message["number"]), int(message["max_tokens"]), tuple(map(int, message["dropped"])))


@dataclass(frozen=True)
class Step:
    """One step of the model. tokens: the new token ids of each sequence. caches: its cache's number. lengths: tokens
    that are in the cache already (more, of a step that was given up, are forgotten). rows: the rows of the batch whose
    logits are wanted. table: whether the embedding table is used, or rows of the file are fetched.
    packed: see ModelRunner.forward. dropped: caches that are no longer needed.
    """

    tokens: tuple[tuple[int, ...], ...]
    caches: tuple[int, ...]
    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    table: bool
    packed: bool = False
    dropped: tuple[int, ...] = ()

    def message(self) -> Message:
        """As it travels."""
        return {
            "kind": STEP, "tokens": self.tokens, "caches": self.caches, "lengths": self.lengths, "rows": self.rows,
            "table": self.table, "packed": self.packed, "dropped": self.dropped,
        }  # fmt: skip

    @classmethod
    def of(cls, message: Message) -> Step:
        """What a message says. Raises WorkerError for one that is no step."""
        try:
            return cls(
                tuple(tuple(map(int, ids)) for ids in message["tokens"]),
                tuple(map(int, message["caches"])),
                tuple(map(int, message["lengths"])),
                tuple(map(int, message["rows"])),
                bool(message["table"]),
                bool(message["packed"]),
                tuple(map(int, message["dropped"])),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WorkerError(f"rank 0 sent a step that cannot be understood ({error!r})") from None


@dataclass(frozen=True)
class StepPart:
    """A replica's part of a step. sequences: their places in the step. rows: the rows of the replica's own batch whose
    logits are wanted. places: where those logits belong among all that are wanted."""

    sequences: tuple[int, ...]
    rows: tuple[int, ...]
    places: tuple[int, ...]


def part_of(step: Step, *, replica: int, replicas: int) -> StepPart:
    """What a replica computes of a step: the sequences that are its own, perhaps none."""
    sequences = tuple(at for at, number in enumerate(step.caches) if number % replicas == replica)
    starts = [0, *accumulate(map(len, step.tokens))]
    own = [row for at in sequences for row in range(starts[at], starts[at + 1])]
    own_row = {row: index for index, row in enumerate(own)}  # row of the step -> row of the replica's batch
    wanted = [(place, own_row[row]) for place, row in enumerate(step.rows) if row in own_row]
    return StepPart(sequences, tuple(row for _, row in wanted), tuple(place for place, _ in wanted))


def own_tokens(step: Step, part: StepPart) -> Sequence[tuple[int, ...]]:
    """The new token ids of the part's sequences."""
    return [step.tokens[at] for at in part.sequences]

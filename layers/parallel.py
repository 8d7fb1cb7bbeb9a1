"""The ranks that share a model's work, as the layers see them: a few collectives, passed along with each step.

What carries them out (torch.distributed) is not known here. A collective is entered by every rank of its group in the
same order, with tensors of agreed shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Group(Protocol):
    """Ranks 0 ... size - 1, of which this process is `rank`."""

    @property
    def size(self) -> int:
        """How many ranks."""
        ...

    @property
    def rank(self) -> int:
        """Which one this is."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, in x's dtype (half precision is added in float32 and rounded once). May be x."""
        ...

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum of all ranks' x (float32). May be x."""
        ...

    def all_gather(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Every rank's x, all of one shape, in the order of the ranks."""
        ...

    def all_to_all(self, x: torch.Tensor, send: Sequence[int]) -> tuple[torch.Tensor, tuple[int, ...]]:
        """x [sum(send), ...] holds the rows for rank 0, for rank 1, ...: `send` of each. Gives the rows that the ranks
        have sent to this one, in the order of the ranks, and how many came from each."""
        ...

    def give_back(self, x: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
        """The way back of an all_to_all: x [sum(received), ...] in the order in which rows came; gives [sum(sent), ...]
        in the order in which this rank had sent them."""
        ...

    def broadcast(self, x: torch.Tensor, *, root: int, ranks: Sequence[int]) -> torch.Tensor:
        """Fill x, which is contiguous, with that of rank `root`; entered by `ranks` alone, root among them. Is x."""
        ...


class SingleGroup:
    """One rank, which is all there are."""

    size, rank = 1, 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x."""
        return x

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        """x."""
        return x

    def all_gather(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x alone."""
        return (x,)

    def all_to_all(self, x: torch.Tensor, send: Sequence[int]) -> tuple[torch.Tensor, tuple[int, ...]]:
        """x."""
        return x, tuple(send)

    def give_back(self, x: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
        """x."""
        return x

    def broadcast(self, x: torch.Tensor, *, root: int, ranks: Sequence[int]) -> torch.Tensor:
        """x."""
        return x


@dataclass(frozen=True)
class StandInGroup:
    """One rank's share without the others, to measure it: sums are this rank's own part, and of what would be sent to
    others nothing comes back (zeros)."""

    size: int
    rank: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x, this rank's part of the sum."""
        return x

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        """x."""
        return x

    def all_gather(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x in every rank's place."""
        return (x,) * self.size

    def all_to_all(self, x: torch.Tensor, send: Sequence[int]) -> tuple[torch.Tensor, tuple[int, ...]]:
        """The rows that are for this rank."""
        first = sum(send[: self.rank])
        return x[first : first + send[self.rank]], tuple(send[at] * (at == self.rank) for at in range(self.size))

    def give_back(self, x: torch.Tensor, received: Sequence[int], sent: Sequence[int]) -> torch.Tensor:
        """This rank's rows in their place, zeros for the others."""
        out = x.new_zeros(sum(sent), *x.shape[1:])
        first = sum(sent[: self.rank])
        out[first : first + sent[self.rank]] = x
        return out

    def broadcast(self, x: torch.Tensor, *, root: int, ranks: Sequence[int]) -> torch.Tensor:
        """x; zeros where another rank would have sent it."""
        return x if root == self.rank else x.zero_()


@dataclass(frozen=True)
class Groups:
    """The groups that a rank is in: `tensor` shares dense layers, `expert` the experts (size 1 where they are cut like
    dense layers, over `tensor`)."""

    tensor: Group = field(default_factory=SingleGroup)
    expert: Group = field(default_factory=SingleGroup)

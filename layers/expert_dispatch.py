"""Expert parallelism: each rank holds some experts whole, and tokens travel to the ranks of the experts they chose.

N tokens of a step, k experts for each, D hidden size; R rows that come to a rank, each a token for one of its experts.
The tokens of a replica are on all its T ranks, so each of those sends its share of them. A row is sent for every choice
of a token, and what the expert gives comes back to the sender, which weighs the k results and adds them in the order of
the experts' numbers: the same sum as on one rank. A rank without tokens takes part all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from layers.expert_rows import weighed
from layers.parallel import Group, Groups
from layers.topology import Topology, experts_of

ApplyExperts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Rows [R, D] and which of the rank's own experts each is for, int64 [R] -> what those give [R, D]."""

_NUMBER = torch.int32  # in which an expert's number travels behind its row


@dataclass(frozen=True)
class ExpertPlaces:
    """Which experts each rank holds, in the order in which it keeps them; an expert may be on several."""

    held: tuple[tuple[int, ...], ...]

    def holders(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each expert (rank, which of that rank's own it is), of every rank that has it."""
        found: dict[int, list[tuple[int, int]]] = {}
        for rank, experts in enumerate(self.held):
            for slot, expert in enumerate(experts):
                found.setdefault(expert, []).append((rank, slot))
        return tuple(tuple(found[expert]) for expert in range(len(found)))

    @cached_property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`holders` as int64 tensors: ranks and places there, each [experts, most holders], of which an expert's first
        few hold; and how many do [experts]."""
        holders = self.holders()
        counts = [len(ranks) for ranks in holders]
        padded = torch.tensor([(*ranks, *ranks[:1] * (max(counts) - len(ranks))) for ranks in holders], device="cpu")
        return padded[..., 0], padded[..., 1], torch.tensor(counts, device="cpu")


def expert_places(topology: Topology, num_experts: int) -> ExpertPlaces:
    """Where the experts of a layer are. Raises ShardError as `experts_of` does."""
    return ExpertPlaces(tuple(experts_of(topology, num_experts, rank=rank) for rank in range(topology.expert)))


@dataclass(frozen=True)
class Sending:
    """What a rank sends: `tokens` [n * k] are those of the rows in the order of their way, `slots` [n * k] which of
    the receiving rank's experts each is for, `counts` how many go to each rank, and `back` [n * k] where the row of a
    token's first choice, second choice, ... is among them."""

    tokens: torch.Tensor
    slots: torch.Tensor
    counts: tuple[int, ...]
    back: torch.Tensor


def arrange(chosen: torch.Tensor, places: ExpertPlaces, *, start: int = 0) -> Sending:
    """How the tokens of chosen [n, k] go to the ranks of their experts: in the order of ranks, and for a rank in that
    of its experts.

    Of the ranks that hold an expert its tokens take turns, in their order and beginning with holder `start`, so that
    ranks which send one token each do not all ask the same one. `chosen` is read on the host once.
    """
    flat = chosen.flatten()
    ranks, slots, holders = (table.to(flat.device) for table in places.tables)
    turns = (_occurrences(flat) + start) % holders[flat]
    rank, slot = ranks[flat, turns], slots[flat, turns]
    order = torch.argsort(rank * (1 + max(map(len, places.held))) + slot, stable=True)
    counts = torch.bincount(rank, minlength=len(places.held)).tolist()
    back = torch.empty_like(order)
    back[order] = torch.arange(order.shape[0], device=order.device)
    return Sending(order // chosen.shape[1], slot[order], tuple(counts), back)


def _occurrences(flat: torch.Tensor) -> torch.Tensor:
    """How often each number [R] has stood before."""
    order = torch.argsort(flat, stable=True)
    ranked = flat[order]
    found = torch.empty_like(flat)
    found[order] = torch.arange(flat.shape[0], device=flat.device) - torch.searchsorted(ranked, ranked)
    return found


def dispatched(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    *,
    places: ExpertPlaces,
    groups: Groups,
    apply: ApplyExperts,
) -> torch.Tensor:
    """x [N, D], weights and chosen [N, k], the same on all ranks of a replica -> the weighed sums [N, D] of what the
    experts of all ranks give, on each of those."""
    own = share_of(x.shape[0], groups.tensor)
    made = _exchanged(x[own], weights[own], chosen[own], places, groups.expert, apply)
    return made if groups.tensor.size == 1 or not x.shape[0] else _put_together(made, x.shape[0], groups.tensor)


def share_of(count: int, group: Group) -> slice:
    """The tokens that this rank of its replica sends."""
    return slice(count * group.rank // group.size, count * (group.rank + 1) // group.size)


def _exchanged(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    places: ExpertPlaces,
    group: Group,
    apply: ApplyExperts,
) -> torch.Tensor:
    sending = arrange(chosen, places, start=group.rank)
    packed, received = group.all_to_all(_packed(x[sending.tokens], sending.slots), sending.counts)
    rows, slots = _unpacked(packed, x.dtype)
    results = group.give_back(apply(rows, slots) if rows.shape[0] else rows, received, sending.counts)
    return weighed(results[sending.back].view(*chosen.shape, x.shape[1]), weights, chosen)


def _packed(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows and the numbers of their experts as bytes, so that they travel as one."""
    numbers = slots.to(_NUMBER).unsqueeze(1)
    return torch.cat((rows.contiguous().view(torch.uint8), numbers.view(torch.uint8)), dim=1)


def _unpacked(packed: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    width = packed.shape[1] - _NUMBER.itemsize
    rows, numbers = packed[:, :width].contiguous().view(dtype), packed[:, width:].contiguous().view(_NUMBER)
    return rows, numbers.squeeze(1).long()


def _put_together(own: torch.Tensor, count: int, group: Group) -> torch.Tensor:
    """The shares of a replica's ranks, one after the other: [count, D]."""
    longest = -(-count // group.size)
    padded = torch.cat((own, own.new_zeros(longest - own.shape[0], own.shape[1])))
    sizes = [count * (rank + 1) // group.size - count * rank // group.size for rank in range(group.size)]
    return torch.cat([part[:size] for part, size in zip(group.all_gather(padded), sizes, strict=True)])

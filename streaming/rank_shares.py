"""What every rank of a mesh reads and keeps, from one matching of names: sums, not each rank's whole plan. [no-torch]

A rank's plan is made anew only for parameters of a kind that was not met before: layers of a large model are alike, so
that the 64 ranks of one with 60 layers cost little more than one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from layers.cuts import cut_param, stage_layers
from layers.model_config import ModelConfig
from layers.topology import Topology
from layers.weights import LayerSpec, ParamSpec
from streaming.param_kinds import param_traits
from streaming.plan import reading_order
from streaming.plan_items import Filling, items_of
from streaming.rank_share import RankShare, expert_numbers
from streaming.shared_reads import nbytes_if_shared

Survey = Callable[[Sequence[LayerSpec], Filling], tuple[RankShare, ...]]
"""(all layers uncut, what they are filled from) -> what each rank has of them."""
_Sums = tuple[int, int]  # bytes read, bytes kept


def rank_shares(
    specs: Sequence[LayerSpec], filling: Filling, *, config: ModelConfig, topology: Topology
) -> tuple[RankShare, ...]:
    """The share of each rank of the mesh, as its own plan has it. Raises ShardError for what cannot be cut."""
    surveyor = _Surveyor(replace(filling, whole_rows=False), config, {}, {}, {})
    shares = [surveyor.share(specs, topology.at(rank)) for rank in range(topology.world)]
    if topology.tensor == 1:
        return tuple(shares)
    return tuple(_both_ways(shares, specs, surveyor, topology, shared=filling.whole_rows))


def _both_ways(
    shares: Sequence[RankShare], specs: Sequence[LayerSpec], surveyor: _Surveyor, topology: Topology, *, shared: bool
) -> Iterator[RankShare]:
    """The shares with the bytes that each rank reads with and without sharing, of which `shared` says what is asked."""
    for one in shares:
        at = topology.at(one.rank)
        if one.rank % topology.stage_ranks == 0:
            layers = list(stage_layers(specs, surveyor.config, at))
            common = nbytes_if_shared(reading_order(layers), surveyor.filling, topology=at)
        both = one.read_nbytes, common[at.tensor_rank] + surveyor.own_expert_nbytes(layers, at)
        yield replace(one, read_nbytes=both[shared], by_sharing=both)


@dataclass(frozen=True)
class _Surveyor:
    filling: Filling
    config: ModelConfig
    kinds: dict[Hashable, int]
    kind_of: dict[str, int]  # parameter -> which of the kinds it is
    known: dict[tuple[int, int], _Sums]  # kind, rank among those that share it

    def share(self, specs: Sequence[LayerSpec], topology: Topology) -> RankShare:
        """One rank's."""
        layers = stage_layers(specs, self.config, topology)
        sums = [self._sums(param, topology) for spec in layers for param in spec.params]
        return RankShare(
            topology.rank, sum(read for read, _ in sums), sum(kept for _, kept in sums),
            expert_numbers(self.config, topology),
        )  # fmt: skip

    def own_expert_nbytes(self, layers: Sequence[LayerSpec], topology: Topology) -> int:
        """Bytes read for experts that are on one rank each."""
        if topology.expert == 1:
            return 0
        return sum(self._sums(one, topology)[0] for spec in layers for one in spec.params if one.sharding.experts)

    def _sums(self, param: ParamSpec, topology: Topology) -> _Sums:
        of_experts = param.sharding.experts and topology.expert > 1
        key = self._kind(param), topology.expert_rank if of_experts else topology.tensor_rank
        if key not in self.known:
            self.known[key] = self._measured(cut_param(param, topology))
        return self.known[key]

    def _kind(self, param: ParamSpec) -> int:
        if param.name not in self.kind_of:
            traits = param_traits(param, self.filling)
            self.kind_of[param.name] = self.kinds.setdefault(traits, len(self.kinds))
        return self.kind_of[param.name]

    def _measured(self, param: ParamSpec | None) -> _Sums:
        if param is None:
            return 0, 0
        items = items_of(param, "", count(), filling=self.filling)
        return sum(item.read_nbytes for item in items), param.nbytes

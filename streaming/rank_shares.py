"""What every rank of a mesh reads and keeps, from one matching of names: sums, not each rank's whole plan. [no-torch]

A rank's plan is made anew only for parameters of a kind that was not met before: layers of a large model are alike, so
that the 64 ranks of one with 60 layers cost little more than one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import count

from layers.cuts import cut_param, stage_layers
from layers.model_config import ModelConfig
from layers.topology import Topology, experts_of
from layers.weights import LayerSpec, ParamSpec
from streaming.checkpoint.tensors import TensorInfo
from streaming.plan_items import Filling, items_of


@dataclass(frozen=True)
class RankShare:
    """Bytes that a rank reads from the files and that it keeps; `experts`: which ones it has of each sparse layer, whole
    or, where experts are cut like dense layers, its part of each."""

    rank: int
    read_nbytes: int
    kept_nbytes: int
    experts: tuple[int, ...] = ()


Survey = Callable[[Sequence[LayerSpec], Filling], tuple[RankShare, ...]]
"""(all layers uncut, what they are filled from) -> what each rank has of them."""
_Sums = tuple[int, int]  # bytes read, bytes kept


def rank_shares(
    specs: Sequence[LayerSpec], filling: Filling, *, config: ModelConfig, topology: Topology
) -> tuple[RankShare, ...]:
    """The share of each rank of the mesh, as its own plan has it. Raises ShardError for what cannot be cut."""
    surveyor = _Surveyor(filling, config, {}, {}, {})
    return tuple(surveyor.share(specs, topology.at(rank)) for rank in range(topology.world))


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

    def _sums(self, param: ParamSpec, topology: Topology) -> _Sums:
        of_experts = param.sharding.experts and topology.expert > 1
        key = self._kind(param), topology.expert_rank if of_experts else topology.tensor_rank
        if key not in self.known:
            self.known[key] = self._measured(cut_param(param, topology))
        return self.known[key]

    def _kind(self, param: ParamSpec) -> int:
        if param.name not in self.kind_of:
            traits = self._traits(param)
            self.kind_of[param.name] = self.kinds.setdefault(traits, len(self.kinds))
        return self.kind_of[param.name]

    def _traits(self, param: ParamSpec) -> Hashable:
        """All that a parameter's items depend on, but for names and places."""
        sources = self.filling.sources
        parts = sources.parts.get(param.name, {})
        coded = sources.coded.get(param.name, {})
        return (
            (param.shape, param.sections, param.kind, param.dtype, param.scheme),
            (param.forms, param.runs, param.sharding),
            tuple((section, first, _traits_of(info)) for section, (info, first) in parts.items()),
            tuple((run, leaf, _traits_of(info)) for run, found in coded.items() for leaf, info in found.items()),
        )

    def _measured(self, param: ParamSpec | None) -> _Sums:
        if param is None:
            return 0, 0
        items = items_of(param, "", count(), filling=self.filling)
        return sum(item.read_nbytes for item in items), param.nbytes


def _traits_of(info: TensorInfo) -> Hashable:
    plain = info.shape, info.dtype, info.nbytes
    if info.is_plain and not info.generated:
        return plain
    order = info.encoding, info.rope_heads, info.big_endian, info.strides, info.shift
    return (*plain, order, info.generated)


def expert_numbers(config: ModelConfig, topology: Topology) -> tuple[int, ...]:
    """The experts of a sparse layer that a rank has, or has a part of; () where the model has none."""
    if config.moe is None:
        return ()
    number = config.moe.num_experts
    return experts_of(topology, number) if topology.expert > 1 else tuple(range(number))

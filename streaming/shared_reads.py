"""Which rank of a tensor group reads what several of them want: once, for all. [no-torch]

What ranks want in common: parameters that each has whole (norms, routers, projections to latents), whole rows where
each takes its columns out of them, heads that several ranks have, and tensors of a quantized weight that are read whole
(scales, permuted codes). Its bytes are read by one of them, the *owner*, and sent to the others.

Every rank computes the same answer, from headers alone, by laying out the items of all ranks of its group: those that
want the same bytes of a file for the same part of a parameter share it, and the one that owns the fewest bytes so far
becomes the owner. Ranks of other groups do not take part: with expert parallelism each of those is a replica that reads
for itself, and an expert is on one rank of a group.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from layers.cuts import cut_param, stage_layers
from layers.model_config import ModelConfig
from layers.topology import Topology
from layers.weights import LayerSpec, ParamSpec
from streaming.checkpoint.tensors import Checkpoint
from streaming.errors import OptionError
from streaming.load_plan import LayerPlan, LoadItem, SharedRead
from streaming.options import LoadOptions
from streaming.param_kinds import param_traits
from streaming.plan_items import Filling, items_of


def check_sharing(checkpoint: Checkpoint, options: LoadOptions) -> None:
    """Raise OptionError where ranks have nothing to share, or do not read in a common order."""
    option = f"--read-sharing {options.read_sharing}"
    if checkpoint.saved is not None:
        raise OptionError(f"{option}: of saved shards each rank has files of its own; leave the option out")
    if checkpoint.format == "dummy":
        raise OptionError(f"{option}: made-up weights are not read from anywhere; leave the option out")
    if options.moe_load == "routed_first" and options.topology().expert == 1:
        raise OptionError(
            f"{option} does not go with --moe-load routed_first, where experts are read in no common order; "
            "--enable-expert-parallel keeps each expert on one rank"
        )


def share_reads(
    layers: Sequence[LayerPlan], specs: Sequence[LayerSpec], filling: Filling, *,
    config: ModelConfig, topology: Topology,
) -> tuple[LayerPlan, ...]:  # fmt: skip
    """A rank's layers with the items that it shares marked; `specs`: all layers, uncut."""
    uncut = {spec.name: spec.params for spec in stage_layers(specs, config, topology)}
    sharing = _Sharing(filling, topology)
    return tuple(sharing.mark(layer, uncut[layer.name]) for layer in layers)


def nbytes_if_shared(layers: Iterable[LayerSpec], filling: Filling, *, topology: Topology) -> tuple[int, ...]:
    """Bytes of these layers (of one stage, uncut, in reading order) that each rank of a tensor group reads if they
    share; without experts that are on one rank each."""
    sharing = _Sharing(replace(filling, whole_rows=True), topology)
    alone = [0] * topology.tensor
    for spec in layers:
        for param in spec.params:
            if not sharing.is_left_out(param):
                pattern = sharing.pattern_of(param)
                sharing.owners(pattern)
                alone = [nbytes + more for nbytes, more in zip(alone, pattern.alone, strict=True)]
    return tuple(nbytes + more for nbytes, more in zip(alone, sharing.owned, strict=True))


@dataclass(frozen=True)
class _Pattern:
    """How the ranks of a group read a parameter. `common`: who wants the same bytes, and how many, in plan order;
    `places`: for each rank, which of those each of its items is; `alone`: bytes that each reads for itself."""

    common: tuple[tuple[tuple[int, ...], int], ...]
    places: tuple[tuple[int | None, ...], ...]
    alone: tuple[int, ...]


@dataclass
class _Sharing:
    """One pass over the parameters of a plan. Those of a kind have one pattern, which is laid out once."""

    filling: Filling
    topology: Topology
    owned: list[int] = field(init=False)  # bytes that each rank reads for all, so far
    _patterns: dict[Hashable, _Pattern] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.owned = [0] * self.topology.tensor

    def is_left_out(self, param: ParamSpec) -> bool:
        """Whether it is experts that are on one rank each, or in another order on another one."""
        return self.topology.expert > 1 and param.sharding.experts > 0

    def mark(self, layer: LayerPlan, params: Iterable[ParamSpec]) -> LayerPlan:
        """The layer's items, saying with whom they are shared."""
        own: dict[str, list[LoadItem]] = {}
        for item in layer.items:
            own.setdefault(item.param.name, []).append(item)
        marked: list[LoadItem] = []
        for param in params:
            items = own.get(param.name, [])
            if self.is_left_out(param):
                marked += items
                continue
            pattern = self.pattern_of(param)
            owners = self.owners(pattern)
            places = pattern.places[self.topology.tensor_rank]
            for item, at in zip(items, places, strict=True):
                marked.append(item if at is None else replace(item, shared=self._shared(pattern, owners, at)))
        return replace(layer, items=tuple(marked))

    def _shared(self, pattern: _Pattern, owners: Sequence[int], at: int) -> SharedRead:
        return SharedRead(owners[at], pattern.common[at][0], self.topology.tensor_rank)

    def owners(self, pattern: _Pattern) -> tuple[int, ...]:
        """Who reads each of the things in common; their bytes are counted."""
        found = []
        for ranks, nbytes in pattern.common:
            owner = min(ranks, key=lambda rank: (self.owned[rank], rank))
            self.owned[owner] += nbytes
            found.append(owner)
        return tuple(found)

    def pattern_of(self, param: ParamSpec) -> _Pattern:
        """How ranks read a parameter of this kind."""
        traits = param_traits(param, self.filling)
        if traits not in self._patterns:
            self._patterns[traits] = self._lay_out(param)
        return self._patterns[traits]

    def _lay_out(self, param: ParamSpec) -> _Pattern:
        ranks = [self.topology.at(rank) for rank in self.topology.tensor_ranks]
        reads = [list(_reads(cut_param(param, rank), self.filling)) for rank in ranks]
        wanted: dict[Hashable, list[int]] = {}
        sizes: dict[Hashable, int] = {}
        for rank, own in enumerate(reads):
            for key, nbytes in own:
                if nbytes:
                    wanted.setdefault(key, []).append(rank)
                    sizes[key] = nbytes
        common = {key: at for at, key in enumerate(key for key, found in wanted.items() if len(found) > 1)}
        return _Pattern(
            tuple((tuple(wanted[key]), sizes[key]) for key in common),
            tuple(tuple(common.get(key) for key, _ in own) for own in reads),
            tuple(sum(nbytes for key, nbytes in own if key not in common) for own in reads),
        )


def _reads(param: ParamSpec | None, filling: Filling) -> Iterator[tuple[Hashable, int]]:
    """Of each item of a rank's part of a parameter: which bytes it is, what for, and how many are read. A rank has no
    two items that are the same."""
    if param is None:
        return
    for item in items_of(param, "", count(), filling=filling):
        section = item.param.parts[item.section].section
        place = item.tensor.file, item.file_offset, item.nbytes, item.stride_nbytes
        yield (section, item.leaf, *place), item.read_nbytes

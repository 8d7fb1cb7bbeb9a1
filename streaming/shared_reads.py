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
from dataclasses import replace
from itertools import count

from layers.cuts import cut_specs
from layers.model_config import ModelConfig
from layers.topology import Topology
from layers.weights import LayerSpec, ParamSpec
from streaming.checkpoint.tensors import Checkpoint
from streaming.errors import OptionError
from streaming.load_plan import LayerPlan, LoadItem, SharedRead
from streaming.options import LoadOptions
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
    layers: Sequence[LayerPlan],
    specs: Sequence[LayerSpec],
    filling: Filling,
    *,
    config: ModelConfig,
    topology: Topology,
) -> tuple[LayerPlan, ...]:
    """A rank's layers with the items that it shares marked; `specs`: all layers, uncut."""
    common = [_without_own_experts(spec, topology) for spec in specs]
    cuts = [
        {spec.name: spec for spec in cut_specs(common, config, topology.at(rank))} for rank in topology.tensor_ranks
    ]
    owned = [0] * topology.tensor
    return tuple(
        _share(layer, [cut[layer.name].params for cut in cuts], filling, owned=owned, rank=topology.tensor_rank)
        for layer in layers
    )


def _without_own_experts(spec: LayerSpec, topology: Topology) -> LayerSpec:
    """The layer without what is on one rank each, or in another order on another one."""
    if topology.expert == 1:
        return spec
    return replace(spec, params=tuple(param for param in spec.params if not param.sharding.experts))


def _share(
    layer: LayerPlan, params: Sequence[Iterable[ParamSpec]], filling: Filling, *, owned: list[int], rank: int
) -> LayerPlan:
    """`params`: what each rank of the group has of the layer; `owned`: bytes of each, which are counted on."""
    wanted: dict[Hashable, list[int]] = {}
    sizes: dict[Hashable, int] = {}
    for at, own in enumerate(params):
        for key, nbytes in _reads(own, layer.name, filling):
            wanted.setdefault(key, []).append(at)
            sizes[key] = nbytes
    owners: dict[Hashable, SharedRead] = {}
    for key, ranks in wanted.items():
        if len(ranks) > 1:
            owner = min(ranks, key=lambda at: (owned[at], at))
            owned[owner] += sizes[key]
            owners[key] = SharedRead(owner, tuple(ranks), rank)
    return replace(layer, items=tuple(_marked(item, owners.get(_key(item))) for item in layer.items))


def _marked(item: LoadItem, shared: SharedRead | None) -> LoadItem:
    return item if shared is None else replace(item, shared=shared)


def _reads(params: Iterable[ParamSpec], layer: str, filling: Filling) -> Iterator[tuple[Hashable, int]]:
    numbers = count()
    for param in params:
        for item in items_of(param, layer, numbers, filling=filling):
            if item.read_nbytes:
                yield _key(item), item.nbytes


def _key(item: LoadItem) -> Hashable:
    """The bytes that an item is, and what they are for: a rank has no two items of one key."""
    section = item.param.parts[item.section].section
    return item.param.name, section, item.leaf, item.tensor.file, item.file_offset, item.nbytes, item.stride_nbytes

"""How many ranks share a model, by what, and which of them this one is. Pure; imports no torch.

A stage of the pipeline has max(T, E) ranks, for tensor parallel size T and expert parallel size E (a multiple of T, or
1): attention and dense layers are cut over T consecutive ranks and are data-parallel over the E / T *replicas*; each
expert is whole on one of the E ranks. With E = 1 experts are cut over T ranks like dense layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from layers.errors import ShardError

PLACEMENTS = ("linear", "round_robin")


@dataclass(frozen=True)
class Topology:
    """The mesh, and a rank's place in it. `expert_map`, if given, lists the experts that each of the E ranks holds (an
    expert may be on several): it stands for `placement`. Raises ShardError for sizes that make no mesh."""

    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    rank: int = 0
    placement: str = "linear"
    expert_map: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        for name in ("tensor", "expert", "pipeline"):
            if getattr(self, name) < 1:
                raise ShardError(f"{name} parallel size {getattr(self, name)}: at least 1 is needed")
        if self.expert > 1 and self.expert % self.tensor:
            raise ShardError(
                f"expert parallel size {self.expert} is no multiple of tensor parallel size {self.tensor}: each group "
                "of ranks that share a dense layer holds whole experts"
            )
        if self.placement not in PLACEMENTS:
            raise ShardError(f"expert placement {self.placement!r} is not known: {' or '.join(PLACEMENTS)} is")
        if not 0 <= self.rank < self.world:
            raise ShardError(f"rank {self.rank} is none of the {self.world} ranks (0 to {self.world - 1})")
        if self.expert_map is not None and len(self.expert_map) != self.expert:
            raise ShardError(f"the expert map has {len(self.expert_map)} ranks, not the {self.expert} of this run")

    def __str__(self) -> str:
        words = f"tensor parallel size {self.tensor} and expert parallel size {self.expert}"
        return words if self.pipeline == 1 else f"{words}, {self.pipeline} stages"

    @property
    def stage_ranks(self) -> int:
        """Ranks of one stage of the pipeline."""
        return max(self.tensor, self.expert)

    @property
    def world(self) -> int:
        """All ranks."""
        return self.stage_ranks * self.pipeline

    @property
    def stage(self) -> int:
        """The stage of the pipeline that this rank is in."""
        return self.rank // self.stage_ranks

    @property
    def tensor_rank(self) -> int:
        """This rank's part of what is cut over T ranks."""
        return self.rank % self.stage_ranks % self.tensor

    @property
    def expert_rank(self) -> int:
        """This rank's part of the experts."""
        return self.rank % self.stage_ranks % self.expert

    @property
    def replicas(self) -> int:
        """Groups of T ranks that hold the same dense layers and work on different sequences."""
        return self.stage_ranks // self.tensor

    @property
    def replica(self) -> int:
        """The group of T ranks that this one is in."""
        return self.rank % self.stage_ranks // self.tensor

    @property
    def is_single(self) -> bool:
        """Whether one rank has it all."""
        return self.world == 1

    def at(self, rank: int) -> Topology:
        """The same mesh seen from another rank."""
        return replace(self, rank=rank)

    @property
    def tensor_ranks(self) -> tuple[int, ...]:
        """The ranks of the world that share this rank's dense layers."""
        first = self.rank - self.tensor_rank
        return tuple(range(first, first + self.tensor))

    @property
    def expert_ranks(self) -> tuple[int, ...]:
        """The ranks of the world that share this stage's experts."""
        first = self.stage * self.stage_ranks
        return tuple(range(first, first + self.expert)) if self.expert > 1 else (self.rank,)

    def layers_of_stage(self, num_layers: int) -> tuple[int, int]:
        """The decoder layers [first, stop) of this rank's stage; the first stages have one more where they do not
        divide. Raises ShardError for more stages than layers."""
        if self.pipeline > num_layers:
            raise ShardError(f"{self.pipeline} stages for {num_layers} layers: each stage needs one")
        size, over = divmod(num_layers, self.pipeline)
        first = self.stage * size + min(self.stage, over)
        return first, first + size + (self.stage < over)


def experts_of(topology: Topology, num_experts: int, *, rank: int | None = None) -> tuple[int, ...]:
    """The experts that an expert rank (None: this one) holds, in the order in which it keeps them.

    The first (experts mod E) ranks hold one more. Raises ShardError for more ranks than experts, and for a map that
    names an expert that there is not, or leaves one out.
    """
    at = topology.expert_rank if rank is None else rank
    if topology.expert_map is not None:
        _check_map(topology.expert_map, num_experts)
        return topology.expert_map[at]
    if topology.expert > num_experts:
        raise ShardError(f"expert parallel size {topology.expert} for {num_experts} experts: each rank needs one")
    if topology.placement == "round_robin":
        return tuple(range(at, num_experts, topology.expert))
    size, over = divmod(num_experts, topology.expert)
    first = at * size + min(at, over)
    return tuple(range(first, first + size + (at < over)))


def _check_map(expert_map: Sequence[Sequence[int]], num_experts: int) -> None:
    held = [expert for experts in expert_map for expert in experts]
    wrong = next((expert for expert in held if not 0 <= expert < num_experts), None)
    if wrong is not None:
        raise ShardError(f"the expert map names expert {wrong}; the model has {num_experts} (0 to {num_experts - 1})")
    missing = sorted(set(range(num_experts)) - set(held))
    if missing:
        raise ShardError(f"the expert map leaves out expert {missing[0]} ({len(missing)} of {num_experts} in all)")
    for rank, experts in enumerate(expert_map):
        if len(set(experts)) != len(experts):
            raise ShardError(f"the expert map names an expert twice on rank {rank}: {list(experts)}")

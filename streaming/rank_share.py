"""What one rank of several reads and keeps, as `plan` shows it. [no-torch]"""

from __future__ import annotations

from dataclasses import dataclass

from layers.model_config import ModelConfig
from layers.topology import Topology, experts_of


@dataclass(frozen=True)
class RankShare:
    """Bytes that a rank reads from the files and that it keeps; `experts`: which ones it has of each sparse layer,
    whole or, where experts are cut like dense layers, its part of each."""

    rank: int
    read_nbytes: int
    kept_nbytes: int
    experts: tuple[int, ...] = ()
    by_sharing: tuple[int, int] | None = None  # bytes read where ranks do not share the reading, and where they do


def expert_numbers(config: ModelConfig, topology: Topology) -> tuple[int, ...]:
    """The experts of a sparse layer that a rank has, or has a part of; () where the model has none."""
    if config.moe is None:
        return ()
    number = config.moe.num_experts
    return experts_of(topology, number) if topology.expert > 1 else tuple(range(number))

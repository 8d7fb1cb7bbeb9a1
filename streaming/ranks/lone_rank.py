"""One rank's part of a run without the others, to measure what it reads, keeps and computes.

It has the plan, the bytes and the products of its rank; what other ranks would give is missing from its sums
(`StandInGroup`), so that its logits mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from layers.parallel import Groups, SingleGroup, StandInGroup
from layers.topology import Topology
from streaming.distributed import ProcessGroups
from streaming.errors import OptionError
from streaming.ranks.report import RankReport
from streaming.residency import Residency


@dataclass
class LoneRank:
    """In the place of a run's Lead or Member (see `run_model`). Raises OptionError for more than one stage: a stage
    needs the one before."""

    topology: Topology
    _residency: Residency | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.topology.pipeline > 1:
            raise OptionError(f"one rank alone of {self.topology.pipeline} stages has nothing to compute: give it one")

    @property
    def as_lead(self) -> None:
        """None: nobody is led."""

    def join(self, device: torch.device) -> ProcessGroups:
        """Groups in which the other ranks are silent."""
        tensor = _group(self.topology.tensor, self.topology.tensor_rank)
        expert = _group(self.topology.expert, self.topology.expert_rank) if self.topology.expert > 1 else tensor
        return ProcessGroups(Groups(tensor, expert), maxima=tensor, reads=tensor)

    def bind(self, residency: Residency, fail: Callable[[BaseException], None]) -> None:
        """Layers are ready in this table when they are published."""
        self._residency = residency

    def show_warnings(self, warn: Callable[[str], None]) -> None:
        """There is nobody else to have any."""

    def publish(self, layer: str) -> None:
        """Nobody else is waited for."""
        assert self._residency is not None
        self._residency.confirm(layer)

    def say_through(self) -> None:
        """Nobody receives anything."""

    def loaded(self, report: RankReport) -> None:
        """The load is over everywhere."""
        assert self._residency is not None
        self._residency.others_loaded()

    def load_failed(self, error: BaseException) -> None:
        """Nobody is to be told."""

    def close(self) -> None:
        """Nothing of it is left."""


def _group(size: int, rank: int) -> SingleGroup | StandInGroup:
    return SingleGroup() if size == 1 else StandInGroup(size, rank)

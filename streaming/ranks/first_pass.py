"""The first pass of a pipeline: a stage may wait for the one before as long as that still loads its layers. [no-torch]

Whoever receives from a rank waits for `--rank-timeout` at the most, and a step takes less. But the first time, the rank
sends only when the last of its layers is there. So each rank says once that it has computed all of them (it is
*through*), and nobody receives from it before. Who is not through and shows no progress either is late.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from layers.topology import Topology

THROUGH = "through"  # a kind of message


@dataclass
class FirstPass:
    """Rank 0's record of it. Times are seconds, monotonic; to be used by one thread at a time."""

    topology: Topology
    _through_s: dict[int, float] = field(default_factory=dict)  # since when a rank is
    _begin_s: float | None = None  # of the step that is under way
    _last: frozenset[int] = frozenset()

    def begin(self, last: Collection[int], now_s: float) -> None:
        """A step begins, at whose end these ranks of the last stage send to rank 0."""
        self._begin_s, self._last = now_s, frozenset(last)

    def end(self) -> None:
        """The step is over."""
        self._begin_s = None

    def note(self, rank: int, now_s: float) -> None:
        """The rank is through."""
        self._through_s.setdefault(rank, now_s)

    def late(self, seen_s: Mapping[int, float], *, held: Collection[int], now_s: float, timeout_s: float) -> int | None:
        """A rank of the first stage that is not through, if others have waited for it for so long without a sign of
        progress (`seen_s`: the last one of each rank). Stages in `held` wait for a layer of a rank of their own."""
        since_s = self._begin_s
        if since_s is None or self.topology.pipeline == 1:
            return None
        for stage in range(self.topology.pipeline):
            senders = self._senders(stage)
            missing = [rank for rank in senders if rank not in self._through_s]
            if missing:
                waited = {rank: now_s - max(since_s, seen_s.get(rank, since_s)) for rank in missing}
                return next((rank for rank in missing if waited[rank] > timeout_s and stage not in held), None)
            since_s = max([since_s, *(self._through_s[rank] for rank in senders)])
        return None

    def _senders(self, stage: int) -> list[int]:
        if stage == self.topology.pipeline - 1:
            return sorted(self._last)
        return list(range(stage * self.topology.stage_ranks, (stage + 1) * self.topology.stage_ranks))

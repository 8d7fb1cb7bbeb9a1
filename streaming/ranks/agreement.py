"""Which ranks have which layers: rank 0's table. [no-torch]

A layer is used once all ranks of its stage of the pipeline have it: whoever enters one of its collectives then finds
the others there. Each rank tells rank 0 what it has published; rank 0 tells all of the stage when the last one has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from layers.topology import Topology
from streaming.errors import RankError
from streaming.ranks.channel import HubChannel, Message, Progress
from streaming.ranks.first_pass import FirstPass
from streaming.residency import Residency

PUBLISHED, AGREED, LOADED = "published", "agreed", "loaded"  # kinds of messages


@dataclass
class Agreement:
    """Of one run. `bind` gives it the table of rank 0's own layers, before which nothing is handed out.

    `clock`: seconds, monotonic.
    """

    hub: HubChannel
    topology: Topology
    clock: Callable[[], float] = time.monotonic
    _residency: Residency | None = None
    _have: dict[tuple[int, str], set[int]] = field(default_factory=dict)  # (stage, layer) -> the ranks that have it
    _seen: dict[int, float] = field(default_factory=dict)  # when a rank last came on
    _since: dict[tuple[int, str], float] = field(default_factory=dict)  # when the latest of some ranks got it
    _progress: dict[int, Progress] = field(default_factory=dict)
    _loaded: set[int] = field(default_factory=set)
    _marks: int = 0  # of rank 0's own load
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self._first_pass = FirstPass(self.topology)

    def bind(self, residency: Residency) -> None:
        """From now on layers are confirmed in this table, and the other ranks are heard."""
        self._residency = residency
        self.hub.on(PUBLISHED, self._note_message)
        self.hub.on(LOADED, lambda rank, message: self._note_loaded(rank))

    def publish(self, layer: str) -> None:
        """Rank 0 has the layer."""
        self._note(0, layer)

    def _note_message(self, rank: int, message: Message) -> None:
        self._note(rank, str(message.get("layer")))

    def _note(self, rank: int, layer: str) -> None:
        stage, now = rank // self.topology.stage_ranks, self.clock()
        with self._lock:  # what is told of a layer is told in the order in which it became true
            have = self._have.setdefault((stage, layer), set())
            have.add(rank)
            self._seen[rank] = self._since[stage, layer] = now
            missing = [other for other in self._ranks(stage) if other not in have]
            if not missing:
                del self._since[stage, layer]
                self._tell(stage, layer)
            elif stage == 0:
                self._own.hold_for(layer, missing[0])

    @property
    def _own(self) -> Residency:
        assert self._residency is not None
        return self._residency

    def _ranks(self, stage: int) -> range:
        return range(stage * self.topology.stage_ranks, (stage + 1) * self.topology.stage_ranks)

    def _tell(self, stage: int, layer: str) -> None:
        for rank in self._ranks(stage):
            if rank == 0:
                self._own.confirm(layer)
            else:
                self.hub.send(rank, {"kind": AGREED, "layer": layer})

    def _note_loaded(self, rank: int) -> None:
        with self._lock:
            self._loaded.add(rank)
            self._seen[rank] = self.clock()
            if len(self._loaded) == self.topology.world - 1:
                self._own.others_loaded()

    # --- the first pass

    def begin_step(self, last: Collection[int]) -> None:
        """A step begins, at whose end these ranks of the last stage send to rank 0."""
        with self._lock:
            self._first_pass.begin(last, self.clock())

    def end_step(self) -> None:
        """It is over."""
        with self._lock:
            self._first_pass.end()

    def note_through(self, rank: int) -> None:
        """The rank has computed all its layers once."""
        with self._lock:
            self._first_pass.note(rank, self.clock())

    # --- who lags

    def laggard(self, timeout_s: float) -> RankError | None:
        """The rank that has kept others waiting for so long, for a layer or in the first pass, and has shown no
        progress either."""
        with self._lock:
            now = self._look_at_progress()
            for (stage, layer), since in self._since.items():
                for rank in self._ranks(stage):
                    late = now - max(since, self._seen.get(rank, since))
                    if rank not in self._have[stage, layer] and late > timeout_s:
                        return self._late(rank, f"for layer {layer}", timeout_s, layer)
            held = {stage for stage, _ in self._since}
            passing = self._first_pass.late(self._seen, held=held, now_s=now, timeout_s=timeout_s)
            return None if passing is None else self._late(passing, "in the first pass", timeout_s)

    def _late(self, rank: int, words: str, timeout_s: float, layer: str = "") -> RankError:
        where = self.hub.progress.get(rank, Progress(layer))
        return RankError(
            rank, f"keeps the others waiting {words} (--rank-timeout {timeout_s:g})",
            layer=where.layer, stage=where.stage, tensor=where.tensor,
        )  # fmt: skip

    def _look_at_progress(self) -> float:
        """Note who has come on since the last look; the time now."""
        now = self.clock()
        for rank, progress in self.hub.progress.items():
            if self._progress.get(rank) != progress:
                self._progress[rank], self._seen[rank] = progress, now
        if self._residency is not None and self._own.marks != self._marks:
            self._marks, self._seen[0] = self._own.marks, now
        return now

"""A follower's work between joining and the end of the run: load its part of the model, do what rank 0 says."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import dataclass

from streaming.clock import RunClock
from streaming.hooks import Hooks
from streaming.model_run import run_model
from streaming.portal import LoopThread
from streaming.prepare import Prepared
from streaming.ranks.channel import Progress, SpokeChannel
from streaming.ranks.member import Member
from streaming.ranks.report import WARNING
from streaming.reader import Reader
from streaming.trace import Tracer

_STAGES = ("slice", "quantize", "post-process")

logger = logging.getLogger(__name__)


def serve(prepared: Prepared, reader: Reader, spoke: SpokeChannel, *, hooks: Hooks | None = None) -> None:
    """Load and run steps until rank 0 closes the run. Raises what ends this rank before; then nothing is left open."""
    topology = prepared.options.topology(spoke.rank)
    member = Member(spoke, topology)
    told = _Telling(spoke, member, hooks or Hooks(), frozenset(prepared.warnings))
    tracer, clock = Tracer(on_begin=told.on_begin), RunClock(start_s=time.monotonic())
    try:
        with closing(LoopThread()) as loop:
            model = loop.enter(run_model(prepared, reader, tracer=tracer, clock=clock, hooks=told.hooks, ranks=member))
            member.follow(model)
    except Exception:
        if not spoke.closing.is_set():
            raise
        logger.debug("the run was closed meanwhile", exc_info=True)


@dataclass(frozen=True)
class _Telling:
    """Rank 0 learns where this rank is, and what it warns of but for what is `known` from headers there too."""

    spoke: SpokeChannel
    member: Member
    given: Hooks
    known: frozenset[str]

    def on_begin(self, lane: str, name: str, layer: str) -> None:
        """An item enters a stage."""
        if lane in _STAGES:
            self._tell(Progress(layer, lane, name))

    @property
    def hooks(self) -> Hooks:
        """What is given, and what rank 0 is told besides."""
        return Hooks(warn=self._warn, on_stage=self._on_stage, layer_outputs=self.given.layer_outputs)

    def _warn(self, text: str) -> None:
        logger.debug("rank %s: %s", self.spoke.rank, text)
        if text not in self.known:
            self.spoke.send({"kind": WARNING, "text": text})

    def _on_stage(self, layer: str, stage: str, nbytes: int, seconds: float) -> None:
        self._tell(Progress(layer, stage))
        self.given.on_stage(layer, stage, nbytes, seconds)

    def _tell(self, progress: Progress) -> None:
        if not self.member.has_failed:  # where it did is the last word
            self.spoke.tell_progress(progress)

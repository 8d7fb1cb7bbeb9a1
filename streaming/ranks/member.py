"""A follower's part in the steps of a model: it does what rank 0 says, in that order."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from layers.batch import make_batch
from layers.kv_cache import KVCache
from layers.topology import Topology
from streaming.distributed import ProcessGroups, Store, join_groups
from streaming.errors import RankError, StreamClosedError, WorkerError
from streaming.packing import pack_layers
from streaming.ranks.agreement import AGREED, LOADED, PUBLISHED
from streaming.ranks.channel import Message, Progress, SpokeChannel, beat_s
from streaming.ranks.first_pass import THROUGH
from streaming.ranks.lead import GROUPS, HERE, STUCK, logits_rank
from streaming.ranks.report import RankReport
from streaming.ranks.steps import CACHE, PACK, STEP, NewCache, Step, own_tokens, part_of
from streaming.ranks.waits import WAITED, Meter, Wait
from streaming.residency import Residency

if TYPE_CHECKING:
    from streaming.model import StreamedModel
    from streaming.runner import ModelRunner

_JUDGED_S = 10.0  # longer than rank 0 takes to say which rank is at fault


@dataclass
class Member:
    """One follower's."""

    spoke: SpokeChannel
    topology: Topology
    _work: queue.SimpleQueue[Message | None] = field(default_factory=queue.SimpleQueue)
    _outcome: queue.SimpleQueue[BaseException | None] = field(default_factory=queue.SimpleQueue)
    has_failed: bool = False  # in a step
    _told: RankReport | None = None
    _runner: ModelRunner | None = None
    _caches: dict[int, KVCache] = field(default_factory=dict)

    @property
    def as_lead(self) -> None:
        """None: rank 0 leads."""

    # --- joining and loading: the same as Lead's

    def join(self, device: torch.device) -> ProcessGroups:
        """Meet the other ranks; returns when all are there. Raises StreamClosedError when the run ends before."""
        told: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._on_close(lambda: told.put(None))
        self.spoke.on(GROUPS, told.put)
        self.spoke.send({"kind": HERE})
        if (message := told.get()) is None:
            raise StreamClosedError("the run was closed before all ranks had met")
        timeout_s, world = self.spoke.rank_timeout_s, self.topology.world
        store = Store.connect(str(message["host"]), int(message["port"]), world=world, timeout_s=timeout_s)
        return join_groups(
            store, self.topology, device=device, timeout_s=timeout_s, blame=self.blame, meter_of=self._meter
        )

    def _meter(self, ranks: tuple[int, ...]) -> Meter:
        return Meter(ranks, self._tell_wait)

    def _tell_wait(self, wait: Wait) -> None:
        said = {"kind": WAITED, "ranks": list(wait.ranks), "number": wait.number, "seconds": wait.seconds}
        with contextlib.suppress(RankError, StreamClosedError):  # the run has ended meanwhile
            self.spoke.send(said)

    def _on_close(self, end: Callable[[], None]) -> None:
        """Call `end` when rank 0 closes the run, which it may have done already."""
        self.spoke.on("close", lambda message: end())
        if self.spoke.closing.is_set():
            end()

    def bind(self, residency: Residency, fail: Callable[[BaseException], None]) -> None:
        """Layers become ready in this table when rank 0 says that all ranks have them."""
        self.spoke.on(AGREED, lambda message: residency.confirm(str(message["layer"])))
        self.spoke.on(THROUGH, lambda message: residency.note_through(int(message["rank"])))

    def show_warnings(self, warn: Callable[[str], None]) -> None:
        """Nothing is told here: see streaming.ranks.serve."""

    def publish(self, layer: str) -> None:
        """This rank has the layer."""
        self.spoke.send({"kind": PUBLISHED, "layer": layer})

    def loaded(self, report: RankReport) -> None:
        """This rank has all its layers."""
        self.spoke.tell_progress(Progress(stage="forward"))
        self._tell(report)
        self.spoke.send({"kind": LOADED})

    def _tell(self, report: RankReport) -> None:
        self._told = report
        self.spoke.send(report.message())

    def load_failed(self, error: BaseException) -> None:
        """This rank cannot go on."""
        self._outcome.put(error)

    def close(self) -> None:
        """Nothing of it is left."""

    # --- steps

    def say_through(self) -> None:
        """This rank has computed all its layers once: whoever receives from it is told."""
        self.spoke.send({"kind": THROUGH})

    def follow(self, model: StreamedModel) -> None:
        """Do what rank 0 says until it closes the run. Raises what ends this rank before."""
        for kind in (CACHE, STEP, PACK):
            self.spoke.on(kind, self._work.put)
        self._on_close(self._end)
        job = model.submit_call(lambda runner, stop: self._obey(model, runner, stop))
        try:
            if (error := self._outcome.get()) is not None:
                raise error
        finally:
            self._work.put(None)
            job.cancel()

    def _end(self) -> None:
        self._work.put(None)
        self._outcome.put(None)

    def _obey(self, model: StreamedModel, runner: ModelRunner, stop: Callable[[], None]) -> None:
        self._runner = runner
        try:
            while (message := self._work.get()) is not None:
                self._carry_out(message, model, runner, stop)
        except Exception as error:
            if not self.spoke.closing.is_set():  # a step that was under way when the run was closed
                self.has_failed = True
                self.spoke.tell_progress(Progress(runner.at, "forward"))
                self._outcome.put(error)

    def _carry_out(self, message: Message, model: StreamedModel, runner: ModelRunner, stop: Callable[[], None]) -> None:
        match message["kind"]:
            case "cache":
                asked = NewCache.of(message)
                self._give_up(asked.dropped)
                if asked.number % self.topology.replicas == self.topology.replica:
                    self._caches[asked.number] = model.new_cache(asked.max_tokens)
            case "pack":
                pack_layers(runner, stop=stop)
            case _:
                self._step(Step.of(message), runner, stop)
                if self._told is not None and self._told.is_outgrown(model.watch.peak_nbytes):
                    self._tell(model.report())

    def _step(self, step: Step, runner: ModelRunner, stop: Callable[[], None]) -> None:
        self._give_up(step.dropped)
        part = part_of(step, replica=self.topology.replica, replicas=self.topology.replicas)
        caches = [self._cache(step.caches[at], step.lengths[at]) for at in part.sequences]
        new = list(zip(own_tokens(step, part), caches, strict=True))
        batch = make_batch(new, vocab_size=runner.model.config.vocab_size, device=runner.device.torch_device)
        logits = runner.run(batch, part.rows, stop=stop, packed=step.packed, table=step.table)
        if logits is not None and part.rows and self.topology.rank == logits_rank(self.topology, self.topology.replica):
            runner.send(logits, to=0)

    def _give_up(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._caches.pop(number, None)

    def _cache(self, number: int, length: int) -> KVCache:
        if number not in self._caches:
            raise WorkerError(f"rank 0 asked for cache {number}, which was not made here")
        cache = self._caches[number]
        cache.truncate(length)
        return cache

    # --- what goes wrong

    def blame(self, words: str, ranks: tuple[int, ...], error: Exception) -> Exception:
        """The error of a collective that broke here. Rank 0 is told, and ends this process with the name of the rank
        at fault; what is returned is for the case that it does not."""
        if not self.spoke.closing.is_set():
            at = "" if self._runner is None else self._runner.at
            self.spoke.send({"kind": STUCK, "words": words, "ranks": ranks, "message": str(error), "layer": at})
            self.spoke.closing.wait(_JUDGED_S + 10 * beat_s(self.spoke.rank_timeout_s))
        return StreamClosedError(f"{words} failed: {error}")

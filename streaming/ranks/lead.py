"""Rank 0's part in the steps of a model on several ranks: it says what is computed, and puts the logits together."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from layers.batch import Batch, make_batch
from layers.kv_cache import KVCache
from layers.topology import Topology
from streaming.distributed import ProcessGroups, Store, join_groups
from streaming.errors import RankError, StreamClosedError, WorkerError
from streaming.forward_thread import RequestCancelled
from streaming.ranks.agreement import Agreement
from streaming.ranks.channel import HubChannel, Message, Progress, beat_s
from streaming.ranks.first_pass import THROUGH
from streaming.ranks.report import REPORT, WARNING, RankReport
from streaming.ranks.steps import PACK, NewCache, Step, own_tokens, part_of
from streaming.ranks.waits import LONG_S, STOOD, WAITED, Meter, Wait, Waits
from streaming.residency import Residency

if TYPE_CHECKING:
    from streaming.runner import ModelRunner

HERE, GROUPS, STUCK = "here", "groups", "stuck"  # kinds of messages
_OF_STEPS = ("a sum", "a gather", "an exchange", "sending", "receiving")  # what other collectives are is loading
_HINDSIGHT_S = 2.0  # from the first broken collective to the verdict: who else waits, and who has died, is known then


class Lead:
    """One run's. `host`: this machine's address as the followers see it."""

    def __init__(self, hub: HubChannel, topology: Topology, *, host: str = "127.0.0.1") -> None:
        self.hub, self.topology, self._host = hub, topology, host
        self._agreement = Agreement(hub, topology)
        self._numbers: weakref.WeakKeyDictionary[KVCache, int] = weakref.WeakKeyDictionary()
        self._dropped: deque[int] = deque()
        self._next = 0  # cache's number
        self._here: set[int] = set()
        self._last_here = 0
        self._begin_s: float | None = None  # since when rank 0 waits for the others
        self._met: tuple[float, float] | None = None  # when rank 0 began to wait for the others, and had met them
        self._waits = Waits()
        self._reports: dict[int, RankReport] = {}
        self._joined = threading.Event()
        self._stuck: dict[int, Message] = {}  # ranks whose collective broke
        self._stuck_s: float | None = None  # since when
        self._runner: ModelRunner | None = None
        self._residency: Residency | None = None
        self._own_error: BaseException | None = None  # of this rank's load
        self._broken: BaseException | None = None  # what ended a step halfway
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="firstlayer-lead", daemon=True)

    @property
    def as_lead(self) -> Lead:
        """This, which leads."""
        return self

    # --- joining

    def join(self, device: torch.device) -> ProcessGroups:
        """Meet the followers; returns when all are there. Raises RankError naming who is not."""
        self._watcher.start()
        self.hub.on_failure(lambda error: self._joined.set())
        self.hub.on(STUCK, lambda rank, message: self._note_stuck(rank, message))
        self.hub.on(REPORT, self._note_report)
        self.hub.on(WAITED, self._note_wait)
        self.hub.on(STOOD, lambda rank, message: self._waits.note_stood(rank, float(message["seconds"])))
        self.hub.on(HERE, lambda rank, message: self._note_here(rank))
        self._begin_s = begin_s = time.monotonic()
        self._joined.wait()
        self._met = (begin_s, time.monotonic())
        if self.hub.failure is not None:
            raise self.hub.failure
        timeout_s = self.hub.rank_timeout_s
        store = Store.serve(self._host, world=self.topology.world, timeout_s=timeout_s)
        self.hub.broadcast({"kind": GROUPS, "host": store.host, "port": store.port})
        return join_groups(
            store, self.topology, device=device, timeout_s=timeout_s, blame=self.blame,
            meter_of=lambda ranks: Meter(ranks, self._waits.note_own, self._at),
        )  # fmt: skip

    def _note_here(self, rank: int) -> None:
        self._here.add(rank)
        if len(self._here) == self.topology.world - 1:
            self._last_here = rank
            self._joined.set()

    def waits(self) -> Iterator[tuple[str, Wait]]:
        """Rank 0's long waits for others since the last call, each with who was waited for: to meet, and in steps."""
        met, self._met = self._met, None
        if met is not None and met[1] - met[0] >= LONG_S:
            yield f"rank {self._last_here}", Wait((), 0, *met)
        yield from self._waits.settle()

    def bind(self, residency: Residency, fail: Callable[[BaseException], None]) -> None:
        """Layers become ready in this table when all ranks have them; `fail(error)` is called once if a rank fails."""
        self._agreement.bind(residency)
        self._residency = residency
        self.hub.on(THROUGH, lambda rank, message: self._note_through(rank))
        self.hub.on_failure(fail)
        if self.topology.pipeline == 1:  # else each stage is at a layer of its own
            self.hub.name_step(self._at)

    def show_warnings(self, warn: Callable[[str], None]) -> None:
        """What the others have to warn of is told here, with their rank."""
        self.hub.on(WARNING, lambda rank, message: warn(f"rank {rank}: {message['text']}"))

    # --- loading

    def publish(self, layer: str) -> None:
        """This rank has the layer. Where the run has ended meanwhile, who waits for the layer has been told."""
        with contextlib.suppress(RankError, StreamClosedError):
            self._agreement.publish(layer)

    def loaded(self, report: RankReport) -> None:
        """This rank has all its layers."""

    @property
    def reports(self) -> Mapping[int, RankReport]:
        """What each follower has said of its load, by rank; those that still load are left out."""
        return dict(self._reports)

    def _note_report(self, rank: int, message: Message) -> None:
        self._reports[rank] = RankReport.of(message)

    def _note_wait(self, rank: int, message: Message) -> None:
        ranks = tuple(int(one) for one in message["ranks"])
        self._waits.note_other(rank, ranks, int(message["number"]), float(message["seconds"]))

    def load_failed(self, error: BaseException) -> None:
        """This rank cannot go on: the others end with its error."""
        self._own_error = error
        self.hub.abort(error)

    # --- steps

    def say_through(self) -> None:
        """This rank has computed all its layers once: whoever receives from it is told."""
        self._note_through(0)

    def _note_through(self, rank: int) -> None:
        assert self._residency is not None
        self._agreement.note_through(rank)
        self._residency.note_through(rank)
        if (receiver := rank + self.topology.stage_ranks) < self.topology.world:
            self.hub.send(receiver, {"kind": THROUGH, "rank": rank})

    def new_cache(self, cache: KVCache, *, max_tokens: int) -> None:
        """A cache has been made here: the others make theirs, and give it up when this one is gone."""
        number = self._numbers[cache] = self._next
        self._next += 1
        weakref.finalize(cache, self._dropped.append, number)  # told with what comes next: it may be anywhere
        self.hub.broadcast(NewCache(number, max_tokens, self._given_up()).message())

    def computes_next_cache(self) -> bool:
        """Whether the sequence of the next cache that is made is of rank 0's own replica."""
        return self._next % self.topology.replicas == self.topology.replica

    def _given_up(self) -> tuple[int, ...]:
        """Caches that are gone here since the others were told last."""
        return tuple(self._dropped.popleft() for _ in range(len(self._dropped)))

    def pack(self) -> None:
        """The others make the packed copies of their weights."""
        self.hub.broadcast({"kind": PACK})

    def forward(
        self, runner: ModelRunner, batch: Batch, rows: Sequence[int], *, stop: Callable[[], None], packed: bool
    ) -> torch.Tensor:
        """As ModelRunner.forward, on all ranks. A step that has begun is not cancelled, since the others compute it."""
        self._runner = runner
        stop()
        if self._broken is not None:
            raise self._broken
        step = self._step(batch, rows, table=runner.has_table(), packed=packed)
        self.hub.broadcast(step.message())
        self._agreement.begin_step([logits_rank(self.topology, replica) for replica, _ in self._places(step)])
        try:
            logits = self._carry_out(runner, step, batch, partial_stop(stop))
        except BaseException as error:
            self._broken = error
            if not isinstance(error, StreamClosedError):  # then the end of the run is on its way
                self.hub.abort(error)
            raise
        finally:
            self._agreement.end_step()
        return logits

    def _step(self, batch: Batch, rows: Sequence[int], *, table: bool, packed: bool) -> Step:
        caches = [sequence.cache for sequence in batch.sequences]
        if any(cache not in self._numbers for cache in caches):
            raise WorkerError("a KV cache of a run on several ranks must be made by the model's `new_cache`")
        ids = batch.token_ids.tolist()
        return Step(
            tokens=tuple(tuple(ids[sequence.start : sequence.stop]) for sequence in batch.sequences),
            caches=tuple(self._numbers[cache] for cache in caches),
            lengths=tuple(cache.length for cache in caches),
            rows=tuple(rows), table=table, packed=packed, dropped=self._given_up(),
        )  # fmt: skip

    def _carry_out(self, runner: ModelRunner, step: Step, batch: Batch, stop: Callable[[], None]) -> torch.Tensor:
        part = part_of(step, replica=0, replicas=self.topology.replicas)
        caches = [batch.sequences[at].cache for at in part.sequences]
        new = list(zip(own_tokens(step, part), caches, strict=True))
        config, device = runner.model.config, runner.device.torch_device
        own = make_batch(new, vocab_size=config.vocab_size, device=device)
        found = runner.run(own, part.rows, stop=stop, packed=step.packed, table=step.table)
        for at in set(range(len(batch.sequences))) - set(part.sequences):
            batch.sequences[at].cache.advance(len(step.tokens[at]))
        if len(part.rows) == len(step.rows) and found is not None:
            return found
        logits = torch.empty(len(step.rows), config.vocab_size, dtype=torch.float32, device=device)
        for replica, places in self._places(step):
            here = found if replica == 0 else None
            logits[list(places)] = self._logits(runner, replica, len(places), stop) if here is None else here
        return logits

    def _places(self, step: Step) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Replicas whose rows' logits are wanted, and where those belong among all."""
        for replica in range(self.topology.replicas):
            if places := part_of(step, replica=replica, replicas=self.topology.replicas).places:
                yield replica, places

    def _logits(self, runner: ModelRunner, replica: int, rows: int, stop: Callable[[], None]) -> torch.Tensor:
        """Those of a replica's rows, from the first of its ranks in the last stage."""
        shape, device = (rows, runner.model.config.vocab_size), runner.device.torch_device
        source = logits_rank(self.topology, replica)
        runner.residency.await_through(source, layer=runner.layers[-1], stop=stop)
        return runner.peers.receive(shape, torch.float32, source=source, device=device)

    # --- what goes wrong

    def blame(self, words: str, ranks: tuple[int, ...], error: Exception) -> BaseException:
        """The error of a collective that broke on this rank: that of the rank at fault, once it is known."""
        self._note_stuck(0, {"words": words, "ranks": ranks, "message": str(error), "layer": self._at()})
        failure = self.hub.wait_failure(_HINDSIGHT_S + 10 * beat_s(self.hub.rank_timeout_s))
        return self._own_error or failure or StreamClosedError(f"{words} failed: {error}")

    def _at(self) -> str:
        return "" if self._runner is None else self._runner.at

    def _note_stuck(self, rank: int, message: Message) -> None:
        self._stuck.setdefault(rank, message)
        self._stuck_s = self._stuck_s or time.monotonic()

    def _watch(self) -> None:
        while not self._closed.wait(beat_s(self.hub.rank_timeout_s)):
            found = self._absent() or self._agreement.laggard(self.hub.rank_timeout_s) or self._verdict()
            if found is not None:
                self.hub.abort(found)
                return

    def _absent(self) -> RankError | None:
        """A rank that lives and does not come to meet the others."""
        timeout_s = self.hub.rank_timeout_s
        if self._joined.is_set() or self._begin_s is None or time.monotonic() - self._begin_s <= timeout_s:
            return None
        rank = min(set(range(1, self.topology.world)) - self._here, default=0)
        where = self.hub.progress.get(rank, Progress())
        words = f"does not come to meet the others (--rank-timeout {timeout_s:g})"
        return RankError(rank, words, layer=where.layer, stage=where.stage, tensor=where.tensor)

    def _verdict(self) -> RankError | None:
        """Who keeps others waiting: a rank that they wait for and that does not wait itself."""
        if self._stuck_s is None or time.monotonic() - self._stuck_s < _HINDSIGHT_S:
            return None
        stuck = dict(self._stuck)
        first, message = min(stuck.items())
        awaited = {int(rank) for said in stuck.values() for rank in said["ranks"]} - stuck.keys()
        rank = min(awaited, default=first)
        where = Progress(message["layer"], "forward")
        if not message["words"].startswith(_OF_STEPS):
            where = self.hub.progress.get(rank, Progress())
        words = f"{message['words']} failed: {message['message']}"
        if awaited:
            words = f"keeps the others waiting in {message['words']} (--rank-timeout {self.hub.rank_timeout_s:g})"
        return RankError(rank, words, layer=where.layer, stage=where.stage, tensor=where.tensor)

    def close(self) -> None:
        """End the watch; the hub is its owner's to close."""
        self._closed.set()


def partial_stop(stop: Callable[[], None]) -> Callable[[], None]:
    """A check for the middle of a step on several ranks: it raises what ends the model, and not what ends a request."""

    def check() -> None:
        try:
            stop()
        except RequestCancelled:
            return

    return check


def logits_rank(topology: Topology, replica: int) -> int:
    """The rank that has the logits of a replica's rows and sends them to rank 0."""
    return (topology.pipeline - 1) * topology.stage_ranks + replica * topology.tensor

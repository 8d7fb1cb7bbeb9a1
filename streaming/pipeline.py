"""The pipeline: the tasks that make a load plan true, item by item in plan order.

    reader ──pieces──► collect ──items──► slice ──► quantize ──► publish ──► residency

`collect` learns which pieces have landed and passes items on in plan order. `slice` decodes and converts, `quantize`
makes the stored form (and behind a layer's last item what its device needs of it, a span "post-process" of its own),
`publish` tells the residency table. Between the stages nothing is buffered, so at most one wide item (or a batch of
small views, see streaming.batches) is in each of them; what bounds the rest is the window, whose items are released as
soon as their bytes are used.
Why it cannot deadlock: pieces are read, and window space is granted, in plan order; every stage handles items in plan
order; so the earliest item that is not published never waits for a later one.

`async` functions only coordinate; work is a plain function on a worker thread. The first error is raised as
LayerLoadError (layer, stage, tensor) after the residency table has been closed with it, so the forward pass ends too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import torch
from anyio.abc import ObjectReceiveStream, ObjectSendStream

from layers.parallel import Group, SingleGroup
from streaming.accounts import Accounts
from streaming.batches import batches
from streaming.cut_storing import Maximum
from streaming.device import Device
from streaming.errors import LayerLoadError, RankError, StreamClosedError
from streaming.file_faults import changed_fault, system_fault
from streaming.hooks import Hooks
from streaming.item_storing import ItemStoring, item_failure, wide_numbers
from streaming.item_words import log_item
from streaming.plan import LayerPlan, LoadItem, LoadPlan
from streaming.post_processing import NO_PROCESSING, PostProcessing
from streaming.reader import Completion, Reader
from streaming.residency import Residency
from streaming.stages import item_views, share
from streaming.trace import Tracer
from streaming.weight_checks import WeightChecks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Work:
    """An item on its way: its wide numbers (None where the bytes already lie in their place), and its last event."""

    item: LoadItem
    wide: torch.Tensor | None = None
    moment: Any = None


_Batch = tuple[_Work, ...]  # of one layer


@dataclass
class Pipeline:
    """One load. `run()` returns when everything is published; cancelling it ends it within one piece of work."""

    plan: LoadPlan
    reader: Reader
    device: Device
    residency: Residency
    tracer: Tracer
    threads: int = 1  # of torch's own, within one worker
    check_weights: bool = False
    hooks: Hooks = field(default_factory=Hooks)
    checks: WeightChecks = field(default_factory=WeightChecks)
    workers: set[threading.Thread] = field(default_factory=set)  # that have run stages
    processing: PostProcessing = NO_PROCESSING
    maximum: Maximum = SingleGroup().maximum  # over the ranks that share layers
    reads: Group = field(default_factory=SingleGroup)  # the same ranks, among which what one has read is shared
    _released: int = 0
    _seconds: dict[tuple[str, str], float] = field(default_factory=dict)  # (layer, stage) -> work so far
    _first: dict[int, LayerPlan] = field(default_factory=dict)  # a layer's first item -> the layer
    _last: dict[int, LayerPlan] = field(default_factory=dict)  # and its last
    _accounts: Accounts = field(default_factory=lambda: Accounts(()))

    def __post_init__(self) -> None:
        self._storing = ItemStoring(self.maximum)

    async def run(self) -> None:
        """Load everything. Raises LayerLoadError for the first item that fails, WorkerError when the reader dies."""
        self._first.update({layer.items[0].index: layer for layer in self.plan.layers if layer.items})
        self._last.update({layer.items[-1].index: layer for layer in self.plan.layers if layer.items})
        self._accounts = Accounts(layer.spec for layer in self.plan.layers)
        try:
            await self._run_stages()
            self._accounts.check()
            self.device.make_room(None)
        except BaseExceptionGroup as group:  # one cause is one error
            error = _first_cause(group)
            self.residency.close(error)
            raise error from error.__cause__
        except BaseException as error:
            cancelled = isinstance(error, anyio.get_cancelled_exc_class())
            self.residency.close(StreamClosedError("the model was closed") if cancelled else error)
            raise

    async def _run_stages(self) -> None:
        read_send, read_receive = anyio.create_memory_object_stream[LoadItem](len(self.plan.items) + 1)
        wide_send, wide_receive = anyio.create_memory_object_stream[_Batch](0)
        kept_send, kept_receive = anyio.create_memory_object_stream[_Batch](0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._collect, read_send)
            tasks.start_soon(self._slice, read_receive, wide_send)
            tasks.start_soon(self._quantize, wide_receive, kept_send)
            tasks.start_soon(self._publish, kept_receive)

    # --- read

    async def _collect(self, send: ObjectSendStream[LoadItem]) -> None:
        items, pieces = self.plan.items, self.reader.read_plan.pieces
        missing = [0] * len(items)
        for piece in pieces:
            missing[piece.item] += 1
        following = 0
        async with send:
            while following < len(items):
                while following < len(items) and missing[following] == 0:
                    self._passed(items[following], "read")
                    await send.send(items[following])
                    following += 1
                if following == len(items):
                    break
                await anyio.wait_readable(self.reader.fileno())
                for done in self.reader.completions():
                    self._note_read(done, items[pieces[done.piece].item])
                    missing[pieces[done.piece].item] -= 1

    def _note_read(self, done: Completion, item: LoadItem) -> None:
        piece = self.reader.read_plan.pieces[done.piece]
        self.tracer.add(
            "read", item.tensor.name, start_s=done.start_s, end_s=done.end_s, layer=item.layer,
            args={"nbytes": 0 if item.tensor.generated else piece.read_nbytes},
        )  # fmt: skip
        self._spend(item, "read", done.end_s - done.start_s)
        if done.error is not None:
            raise LayerLoadError(item.layer, "read", item.tensor.name, read_fault(item, done.error))

    # --- slice and quantize

    async def _slice(self, receive: ObjectReceiveStream[LoadItem], send: ObjectSendStream[_Batch]) -> None:
        async with receive, send:
            async for items in batches(receive):
                try:
                    self.residency.reserve(items[0].layer)
                except Exception as error:  # a callback's
                    raise item_failure(items[0], "slice", error) from error
                self.residency.mark(items[0].layer, "slice")
                await send.send(await self._worker(items, "slice", self._slice_now))

    def _slice_now(self, item: LoadItem) -> _Work:
        log_item(item, topology=self.plan.topology)
        if item.direct:
            with self._span("slice", item):
                self.device.check(item.layer)  # before its bytes are touched, where they lie in a map, and after
                (view,) = item_views(item, self.device.stored[item.param.name]).values()
                share(item, view, group=self.reads)
                self.checks.add(item, view)
                self.device.check(item.layer)
            return _Work(item)
        if (layer := self._first.get(item.index)) is not None:
            self.device.make_room(layer)
        raw = torch.empty(item.nbytes, dtype=torch.uint8) if item.is_received else self.device.staged(item)
        with self.device.working(), self._span("slice", item):
            wide = wide_numbers(item, share(item, raw, group=self.reads), self.device)
            self.checks.add(item, wide)
        return _Work(item, wide, self.device.moment())

    async def _quantize(self, receive: ObjectReceiveStream[_Batch], send: ObjectSendStream[_Batch]) -> None:
        async with receive, send:
            async for batch in receive:
                done = await self._quantized(batch)
                for work in done:
                    self._passed(work.item, "quantize")
                last = done[-1].item
                layer = self._last.get(last.index)
                if layer is not None and self.processing.due(layer.spec):
                    self.residency.mark(layer.name, "post-process")
                    (processed,) = await self._worker((last,), "post-process", partial(self._process_now, layer))
                    done = (*done[:-1], processed)
                await send.send(done)

    async def _quantized(self, batch: _Batch) -> _Batch:
        wide = {work.item.index: work for work in batch if work.wide is not None}
        if not wide:
            return batch
        items = [work.item for work in wide.values()]
        self.residency.mark(items[0].layer, "quantize")
        made = await self._worker(items, "quantize", lambda item: self._quantize_now(wide[item.index], item))
        self._release(sum(item.is_staged for item in items))
        by_index = {work.item.index: work for work in made}
        return tuple(by_index.get(work.item.index, work) for work in batch)

    def _quantize_now(self, work: _Work, item: LoadItem) -> _Work:
        assert work.wide is not None
        with self.device.working(), self._span("quantize", item):
            self._storing.store(item, work.wide, self.device.stored[item.param.name])
        moment = self.device.moment()
        self.device.await_moment(work.moment)  # the window's bytes are on the device: they may be overwritten
        return _Work(item, None, moment)

    def _process_now(self, layer: LayerPlan, item: LoadItem) -> _Work:
        with self.device.working(), self.tracer.span("post-process", layer.name, layer=layer.name):
            self.processing.process(self.device.stored, layer.spec)
        return _Work(item, None, self.device.moment())

    def _release(self, count: int) -> None:
        self._released += count
        if count:
            self.reader.release(self._released)

    # --- publish

    async def _publish(self, receive: ObjectReceiveStream[_Batch]) -> None:
        async with receive:
            async for batch in receive:
                for work in batch:
                    self._publish_one(work)
                self.residency.mark(batch[0].item.layer, "read")

    def _publish_one(self, work: _Work) -> None:
        if self.check_weights:
            self._judge(work.item)
        self._publish_now(work)
        if not self.check_weights:
            self._judge(work.item)
        self._passed(work.item, "publish")

    def _publish_now(self, work: _Work) -> None:
        item = work.item
        try:
            self._accounts.note(item)
            with self._span("publish", item):
                if work.moment is None:
                    self.residency.publish_rows(item.layer, item.param.name, published_rows(item))
                if item.index in self._last:
                    self._accounts.check(item.layer)
                    self.residency.publish(item.layer, event=work.moment)
        except LayerLoadError:
            raise
        except Exception as error:
            raise item_failure(item, "publish", error) from error

    def _judge(self, item: LoadItem) -> None:
        if self.device.torch_device.type != "cpu" and not self.check_weights and item.index < len(self.plan.items) - 1:
            return  # a look at the numbers would wait for the device: once, at the end
        with self.device.working():
            self.checks.settle(strict=self.check_weights, warn=self.hooks.warn)

    def _passed(self, item: LoadItem, stage: str) -> None:
        """An item has left a stage; with the layer's last one the whole layer has."""
        if (layer := self._last.get(item.index)) is not None:
            nbytes = layer.read_nbytes if stage == "read" else layer.kept_nbytes
            self.hooks.on_stage(layer.name, stage, nbytes, self._seconds.get((layer.name, stage), 0.0))

    # --- workers

    async def _worker(
        self, items: Sequence[LoadItem], stage: str, work: Callable[[LoadItem], _Work]
    ) -> tuple[_Work, ...]:
        return await anyio.to_thread.run_sync(self._in_worker, work, items, stage)

    def _in_worker(self, work: Callable[[LoadItem], _Work], items: Sequence[LoadItem], stage: str) -> tuple[_Work, ...]:
        self.workers.add(threading.current_thread())
        torch.set_num_threads(self.threads)  # thread-local, as is the next: both belong into the worker
        with torch.inference_mode():
            done: list[_Work] = []
            for item in items:
                if done and self.residency.error is not None:  # the end has come in the middle of a batch
                    raise self.residency.error
                done.append(self._work_on(item, stage, work))
            return tuple(done)

    def _work_on(self, item: LoadItem, stage: str, work: Callable[[LoadItem], _Work]) -> _Work:
        begin = time.monotonic()
        try:
            return work(item)
        except (RankError, StreamClosedError):  # of another rank, or of the end: not this item's
            raise
        except Exception as error:
            raise item_failure(item, stage, error) from error
        finally:
            self._spend(item, stage, time.monotonic() - begin)

    def _spend(self, item: LoadItem, stage: str, seconds: float) -> None:
        self._seconds[item.layer, stage] = self._seconds.get((item.layer, stage), 0.0) + seconds

    def _span(self, lane: str, item: LoadItem) -> Any:
        return self.tracer.span(lane, item.tensor.name, layer=item.layer)


def published_rows(item: LoadItem) -> int:
    """How many of the parameter's first rows are there once this item is (items of a parameter come in order)."""
    if item.stored is not None:  # what goes with the rows (their scales) has come before them
        return item.rows[1] if item.stored == item.param.name.rpartition(".")[2] else 0
    if item.leaf and not (item.completes or (item.param.kept_as_stored and item.fills == "weight")):
        return item.param.section_starts[item.section]
    return item.param.section_starts[item.section] + item.section_rows[1]


def read_fault(item: LoadItem, error: int | str) -> str:
    """What went wrong with a read, in words."""
    if error == "short":
        return f"{item.tensor.file} ended before its byte {item.file_offset + item.nbytes:,}: it shrank during the load"
    if error == "changed":
        return changed_fault(item.tensor.file)
    return error if isinstance(error, str) else system_fault(item.tensor.file, error)


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_cause(first) if isinstance(first, BaseExceptionGroup) else first

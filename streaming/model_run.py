"""The run of a model that is being streamed in: its shell, the pipeline's tasks, and the end of all that was begun.

`run_model` is the asynchronous core. Everything it starts ends when its block ends: tasks, threads, the reader's
process, page-locked memory.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from layers.decoder import DecoderModel, build_shell
from layers.parallel import SingleGroup
from layers.topology import Topology
from quant.device_features import DeviceFeatures
from quant.kernels import KernelMode, Kernels
from streaming.clock import RunClock
from streaming.device import Device, StoredTensors, open_device
from streaming.embedding_rows import EmbeddingRows
from streaming.errors import OptionError, StreamClosedError
from streaming.heap import trim_heap
from streaming.hooks import Hooks
from streaming.memory_watch import MemoryWatch
from streaming.model import StreamedModel
from streaming.panel_pool import PanelPool
from streaming.pipeline import Pipeline
from streaming.post_processing import NO_PROCESSING, PostProcessing, plan_processing
from streaming.prepare import Prepared
from streaming.reader import Reader
from streaming.residency import Residency
from streaming.retie import compare_tied
from streaming.runner import ModelRunner, choose_threads
from streaming.trace import Tracer
from streaming.warm_up import DeviceWarmUp, warm_up_device
from streaming.weight_checks import WeightChecks

if TYPE_CHECKING:
    from streaming.distributed import ProcessGroups
    from streaming.expert_cache import ExpertCache
    from streaming.expert_loading import ExpertLoader
    from streaming.ranks.lead import Lead
    from streaming.ranks.lone_rank import LoneRank
    from streaming.ranks.member import Member
    from streaming.stored_cache import StoredCache
    from streaming.stream_plan import StreamPlan
    from streaming.weight_stream import WeightStream


@asynccontextmanager
async def run_model(
    prepared: Prepared,
    reader: Reader,
    *,
    tracer: Tracer,
    clock: RunClock,
    hooks: Hooks,
    ranks: Lead | Member | LoneRank | None = None,
) -> AsyncIterator[StreamedModel]:
    """Stream the planned model in for the length of the block. Gives the model as soon as its shell exists.

    `ranks`: this rank's part in a run of several, who meet before the shell is built. Raises the load's error once at
    the end of the block, unless the block itself ended with it.
    """
    plan = prepared.plan
    bounded = plan.stream is not None and bool(plan.experts)
    device = open_device(prepared.options.device, plan, reader, bounded_experts=bounded)
    groups: ProcessGroups | None = None
    try:
        if ranks is not None:
            groups = await anyio.to_thread.run_sync(ranks.join, device.torch_device)
        features = DeviceFeatures.detect(device.torch_device, triton=False)
        processing = plan_processing(prepared.specs, features) if prepared.post_process else NO_PROCESSING
        streamed = _assemble(
            prepared, reader, device, processing, features=features, tracer=tracer, clock=clock, hooks=hooks,
            ranks=ranks, groups=groups,
        )  # fmt: skip
        told = replace(hooks, warn=streamed.note)
        forms = None if plan.stream is None else _open_forms(prepared, plan.stream, told)
        if plan.experts:
            streamed.runner.experts = _open_experts(streamed, device, processing, told, forms)
        if plan.stream is not None:
            streamed.runner.stream = _open_stream(streamed, plan.stream, device, told, forms)
    except BaseException:
        if groups is not None:
            groups.close()
        if ranks is not None:
            ranks.close()
        device.close()
        raise
    if ranks is not None:
        ranks.show_warnings(told.warn)
    pipeline = _pipeline(streamed, reader, device, processing, hooks=told, groups=groups)
    warming = warm_up_device(
        prepared.options.device, processing.shell_specs(prepared.specs),
        device=device.torch_device, kernels=streamed.runner.kernels,
    )  # fmt: skip
    failure: BaseException | None = None
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_load, pipeline, streamed, device)
            try:
                yield streamed
            except BaseException as error:
                failure = error  # raised behind the task group, which would wrap it
            streamed.close()
            tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_shut_down, streamed, device, reader, warming)
            if ranks is not None:
                ranks.close()
    if failure is not None:
        raise failure
    if streamed.load_error is not None and streamed.told is not streamed.load_error:
        raise streamed.load_error


def _assemble(
    prepared: Prepared,
    reader: Reader,
    device: Device,
    processing: PostProcessing,
    *,
    features: DeviceFeatures,
    tracer: Tracer,
    clock: RunClock,
    hooks: Hooks,
    ranks: Lead | Member | LoneRank | None,
    groups: ProcessGroups | None,
) -> StreamedModel:
    topology = Topology() if ranks is None else ranks.topology
    with tracer.span("shell", "modules"):
        shell = build_shell(prepared.config, processing.shell_specs(prepared.specs), topology=topology)
        attach(shell, processing.seen(device.stored))
    apart = {one.of: one.plan.name for one in prepared.plan.experts}
    named = ((spec.name, apart.get(spec.name)) for spec in prepared.specs if spec.params)
    layers = [name for pair in named for name in pair if name is not None]
    residency = Residency(layers, tracer, check=device.check, agree=None if ranks is None else ranks.publish)
    options = prepared.options
    panels = PanelPool()
    kernels = Kernels.detect(mode=KernelMode(options.kernels), run=panels)
    table = prepared.plan.table
    state = None if table is None else prepared.read_plan.state_of(table.file)
    rows = EmbeddingRows(table, dtype=prepared.dtype, state=state)
    threads = choose_threads(options.threads)
    runner = ModelRunner(
        shell, device, residency, rows, kernels, tracer, threads, panels, hooks.layer_outputs,
        int8_activations=options.activation_dtype == "int8", topology=topology, process_groups=groups,
        lead=None if ranks is None else ranks.as_lead,
        say_through=(lambda: None) if ranks is None else ranks.say_through,
    )  # fmt: skip
    pid = reader.pid
    watch = MemoryWatch(shared=lambda: reader.shared_nbytes, pids=lambda: [] if pid is None else [pid])
    streamed = StreamedModel(prepared, residency, runner, tracer, clock, watch, features, hooks, ranks=ranks)
    if ranks is not None:
        ranks.bind(residency, streamed.fail)
    for text in prepared.warnings:
        streamed.note(text)
    return streamed


def _pipeline(
    streamed: StreamedModel,
    reader: Reader,
    device: Device,
    processing: PostProcessing,
    *,
    hooks: Hooks,
    groups: ProcessGroups | None,
) -> Pipeline:
    prepared = streamed.prepared
    return Pipeline(
        prepared.plan, reader, device, streamed.residency, streamed.tracer,
        threads=streamed.runner.threads.loading, check_weights=prepared.options.check_weights,
        hooks=hooks, checks=WeightChecks(norm=prepared.config.norm), workers=streamed.workers,
        processing=processing, maximum=(SingleGroup() if groups is None else groups.maxima).maximum,
        reads=SingleGroup() if groups is None else groups.reads,
    )  # fmt: skip


def _open_experts(
    streamed: StreamedModel, device: Device, processing: PostProcessing, hooks: Hooks, forms: StoredCache | None
) -> ExpertLoader | ExpertCache:
    from streaming.expert_cache import ExpertCache
    from streaming.expert_foresight import make_foresight
    from streaming.expert_loading import open_experts

    prepared, stream = streamed.prepared, streamed.prepared.plan.stream
    for one in prepared.plan.experts:
        if processing.due(one.plan.spec):
            raise OptionError(
                f"--moe-load routed_first: on {prepared.options.device} the experts of {one.of} are processed once "
                "they are whole; leave the option out"
            )
    experts = open_experts(
        prepared, device, streamed.residency, streamed.tracer, hooks=hooks, stored=forms,
        capacity_nbytes=None if stream is None else stream.experts_nbytes,
    )  # fmt: skip
    if isinstance(experts, ExpertCache):
        runner, is_ready = streamed.runner, streamed.residency.is_ready
        runner.foresight = make_foresight(
            runner.model, runner.kernels, is_ready=is_ready, foresee=experts.foresee,
            is_wanted=lambda: experts.outlook.is_worth_a_look,
        )  # fmt: skip
    return experts


def _open_forms(prepared: Prepared, plan: StreamPlan, hooks: Hooks) -> StoredCache | None:
    from streaming.open_stream import open_forms

    return open_forms(prepared, plan, warn=hooks.warn)


def _open_stream(
    streamed: StreamedModel, plan: StreamPlan, device: Device, hooks: Hooks, forms: StoredCache | None
) -> WeightStream:
    from streaming.open_stream import open_stream

    return open_stream(
        streamed.prepared, plan, device=device, shell=streamed.runner.model, residency=streamed.residency,
        tracer=streamed.tracer, hooks=hooks, forms=forms,
    )  # fmt: skip


async def _load(pipeline: Pipeline, streamed: StreamedModel, device: Device) -> None:
    try:
        _publish_empty(pipeline, streamed.residency)
        if streamed.runner.stream is not None:
            streamed.runner.stream.start()
        if streamed.runner.experts is not None:
            streamed.runner.experts.start()
        await pipeline.run()
        if streamed.runner.experts is not None:
            streamed.runner.experts.base_loaded()
            if not await anyio.to_thread.run_sync(streamed.runner.experts.wait):
                return  # the model was closed
        if streamed.ranks is not None:
            streamed.ranks.loaded(streamed.report())
        if streamed.runner.lead is not None:
            await anyio.to_thread.run_sync(streamed.residency.wait_everywhere)
        if streamed.prepared.retie and {"embed", "head"} <= streamed.residency.states().keys():  # of one stage: both
            await anyio.to_thread.run_sync(compare_tied, streamed, device, pipeline.hooks.warn)
        if streamed.runner.stream is not None:
            await anyio.to_thread.run_sync(trim_heap)
        streamed.clock.once("load_end_s")
        streamed.tracer.mark("first layer ready", at_s=streamed.residency.first_ready_s)
        streamed.tracer.mark("load done", at_s=streamed.clock.load_end_s)
        streamed.residency.finish()
    except Exception as error:
        if streamed.closing and isinstance(error, StreamClosedError):
            return  # closed while other ranks still loaded, or in the last checks
        streamed.fail(error)  # of the last checks too: whoever waits for the end of the load
        if streamed.ranks is not None and not streamed.closing:
            streamed.ranks.load_failed(error)


def _publish_empty(pipeline: Pipeline, residency: Residency) -> None:
    """Layers of which this rank has nothing to load (the vocabulary's rows may end before its part of them)."""
    apart = (item for one in pipeline.plan.experts for item in one.plan.items)
    loaded = {item.layer for item in (*pipeline.plan.items, *apart)}
    for layer in residency.states():
        if layer not in loaded:
            residency.publish(layer)


def attach(shell: DecoderModel, stored: StoredTensors) -> None:
    """Give every parameter of the shell its (still unfilled) memory in place of the meta tensor."""
    for param, tensors in stored.items():
        module = param.rpartition(".")[0]
        for name, tensor in tensors.items():
            shell.assign(f"{module}.{name}", tensor)


def _shut_down(streamed: StreamedModel, device: Device, reader: Reader, warming: DeviceWarmUp | None) -> None:
    streamed.join()
    if streamed.runner.process_groups is not None:
        streamed.runner.process_groups.close()
        streamed.runner.process_groups = None  # with it go its sockets and threads, and not when a collection comes by
    if warming is not None:
        warming.close()
    streamed.watch.close()
    streamed.runner.rows.close()
    if streamed.runner.experts is not None:
        streamed.runner.experts.join()
    if streamed.runner.stream is not None:
        streamed.runner.stream.join()
    streamed.runner.panels.close()
    reader.close()
    device.close()

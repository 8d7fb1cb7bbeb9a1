"""A model's memory limit changed while it runs: weights that no longer fit are streamed, others come to stay."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from layers.architecture import EMBED_WEIGHT
from streaming.budget import Budget
from streaming.errors import BudgetError, OptionError
from streaming.heap import trim_heap
from streaming.load_plan import LoadPlan
from streaming.prepare import budget_within, memory_limit
from streaming.stream_plan import StreamPlan

if TYPE_CHECKING:
    from streaming.model import StreamedModel
    from streaming.weight_stream import WeightStream


def set_memory(streamed: StreamedModel, memory: str | int) -> None:
    """Keep the model within another limit from now on. Waits for the end of the load.

    What has to go is gone when this returns; what is to stay comes in the passes that follow. A pass that runs is not
    disturbed, and no bit of what is computed changes. Raises BudgetError where the limit is too small, with what is
    needed, and nothing changes then; OptionError for what is no size.
    """
    if memory is None:
        raise OptionError("set_memory(None): a size such as 512MiB or 12GiB is needed, or auto")
    limit = memory_limit(streamed.prepared.options.within_memory(memory))
    assert limit is not None
    limit -= 0 if streamed.draft is None else streamed.draft.nbytes
    streamed.wait_loaded()
    with streamed.changing_memory:
        _keep_within(streamed, limit, caches_nbytes=streamed.caches_nbytes)
    trim_heap()


def fit_caches(streamed: StreamedModel, caches_nbytes: int) -> None:
    """Let KV caches take so much in the place of weights that stay, or give back what they do not need any more.

    For the forward thread of a model with a stream, between two passes; waits for the end of the load where something
    has to go. Raises BudgetError where that is not possible; nothing changes then.
    """
    limit, now = streamed.budget.limit_nbytes, streamed.budget.cache_nbytes
    assert limit is not None
    most = streamed.prepared.budget.cache_nbytes
    if caches_nbytes > now or (now > most and caches_nbytes < now // 2):
        streamed.residency.wait_finished()
        with streamed.changing_memory:
            _keep_within(streamed, limit, caches_nbytes=caches_nbytes)


def caches_fit(streamed: StreamedModel, caches_nbytes: int) -> bool:
    """Whether KV caches could take so much."""
    assert streamed.budget.limit_nbytes is not None
    try:
        _planned(streamed, streamed.budget.limit_nbytes, caches_nbytes)
    except BudgetError:
        return False
    return True


def _planned(streamed: StreamedModel, limit: int, caches_nbytes: int) -> tuple[LoadPlan, Budget]:
    """With the ring that there is, or a smaller one where that leaves too little."""
    stream, prepared = streamed.runner.stream, streamed.prepared
    ring = None if stream is None else stream.plan.ring_nbytes or None
    try:
        return budget_within(prepared, limit, ring_nbytes=ring, caches_nbytes=caches_nbytes)
    except BudgetError:
        return budget_within(prepared, limit, ring_nbytes=None, caches_nbytes=caches_nbytes)


def _keep_within(streamed: StreamedModel, limit: int, *, caches_nbytes: int) -> None:
    stream = streamed.runner.stream
    plan, budget = _planned(streamed, limit, caches_nbytes)
    if stream is None and plan.stream is not None:
        stream = _begin(streamed, plan.stream)
    streamed.budget = budget
    if stream is not None:
        stream.change(plan.stream or _everything(stream.plan))
    if budget.experts_nbytes:
        from streaming.expert_cache import ExpertCache

        if isinstance(streamed.runner.experts, ExpertCache):
            streamed.runner.experts.set_capacity(budget.experts_nbytes)


def _everything(plan: StreamPlan) -> StreamPlan:
    return replace(plan, kept=frozenset(unit.name for unit in plan.units), tier=frozenset())


def _begin(streamed: StreamedModel, plan: StreamPlan) -> WeightStream:
    """A stream for a model that was loaded whole: between two passes, since one that runs knows of none."""
    from streaming.open_stream import open_forms, open_stream

    prepared, runner = streamed.prepared, streamed.runner
    begin = replace(_everything(plan), ring_nbytes=0)
    stream = open_stream(
        prepared, begin, device=runner.device, shell=runner.model, residency=streamed.residency,
        tracer=streamed.tracer, hooks=replace(streamed.hooks, warn=streamed.note),
        forms=open_forms(prepared, plan, warn=streamed.note),
    )  # fmt: skip
    stream.start()
    with runner.computing:
        runner.stream = stream
        if not plan.has_table and EMBED_WEIGHT in runner.device.stored and EMBED_WEIGHT not in plan.params:
            runner.model.release(EMBED_WEIGHT)  # its rows are fetched from now on
            runner.device.discard(EMBED_WEIGHT)
    return stream

"""A model's memory limit changed while it runs: weights that no longer fit are streamed, others come to stay."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from streaming.errors import BudgetError
from streaming.expert_cache import ExpertCache
from streaming.prepare import budget_within, memory_limit
from streaming.sizes import format_size
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
    limit = memory_limit(replace(streamed.prepared.options, memory=memory))
    assert limit is not None
    limit -= 0 if streamed.draft is None else streamed.draft.nbytes
    streamed.wait_loaded()
    with streamed.changing_memory:
        stream = streamed.runner.stream
        beyond = max(0, streamed.caches_nbytes - streamed.prepared.budget.cache_nbytes)
        plan, budget = budget_within(
            streamed.prepared, limit - beyond, ring_nbytes=(stream and stream.plan.ring_nbytes) or None
        )
        if limit <= beyond:
            raise BudgetError(
                f"--memory {format_size(limit)} is too small: the KV caches that are in use take "
                f"{format_size(streamed.caches_nbytes)} alone"
            )
        budget = replace(budget, limit_nbytes=limit)
        if stream is None and plan.stream is not None:
            stream = _begin(streamed, plan.stream)
        streamed.budget = budget
        if stream is not None:
            stream.change(plan.stream or _everything(stream.plan))
        if budget.experts_nbytes and isinstance(streamed.runner.experts, ExpertCache):
            streamed.runner.experts.set_capacity(budget.experts_nbytes)


def _everything(plan: StreamPlan) -> StreamPlan:
    return replace(plan, kept=frozenset(unit.name for unit in plan.units))


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
    return stream

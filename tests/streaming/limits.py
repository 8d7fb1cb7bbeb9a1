"""Memory limits that a model does not fit into, and those that it just does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from streaming.options import LoadOptions
from streaming.prepare import STREAMED_CACHE_TOKENS, Prepared, prepare
from streaming.stream_budget import needs_of


def limits_of(folder: Path, **options: Any) -> tuple[int, int]:
    """The least memory that the model can be streamed in, and what it takes whole; bytes."""
    whole = prepare(str(folder), LoadOptions(**options))
    apart = prepare(str(folder), LoadOptions(**options | {"memory": whole.budget.peak_nbytes - 1}))
    assert whole.budget_of is not None
    plan = whole.plan if not apart.plan.experts else with_experts_apart(whole)
    least_of = partial(whole.budget_of, cache_tokens=STREAMED_CACHE_TOKENS)
    return needs_of(plan, least_of).least_nbytes, whole.budget.peak_nbytes


def with_experts_apart(prepared: Prepared) -> Any:
    from streaming.expert_plan import with_experts_apart as apart

    return apart(prepared.plan, prepared.options)


def limit_of(folder: Path, share: float, **options: Any) -> int:
    """A limit between the two."""
    least, whole = limits_of(folder, **options)
    return least + int(share * (whole - least))

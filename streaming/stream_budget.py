"""What stays in memory and what is streamed, for a limit that the whole model does not fit into. Pure. [no-torch]

The limit is shared out in this order: what every pass needs whatever it is (norms, routers and the like, the KV cache,
the window and what conversion holds), the ring and the fewest experts that a step can be computed with, weights that
stay, and what is left for more experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from layers.topology import Topology
from streaming.budget import Budget, host_too_small, too_small
from streaming.errors import BudgetError
from streaming.load_plan import LoadPlan
from streaming.options import LoadOptions
from streaming.read_strategy import BACK_ENDS
from streaming.sizes import format_needed, format_size
from streaming.stream_plan import StreamPlan, Unit, choose_kept, ring_nbytes, units_of, without_units

BudgetOf = Callable[[LoadPlan], Budget]  # without a limit


def why_not_streamed(options: LoadOptions, topology: Topology) -> str | None:
    """Why nothing can be streamed in this load, in words; None where it can."""
    if not topology.is_single:
        return "weights are streamed on one rank only"
    if options.kernels == "fast":
        return "--kernels fast keeps packed copies of all weights"
    if options.load_format in BACK_ENDS:
        return f"--load-format {options.load_format} reads in its package's own order"
    if options.safetensors_load_strategy == "eager":
        return "--safetensors-load-strategy eager reads whole files"
    return "--remote-cache fetches whole files" if options.remote_cache is not None else None


@dataclass(frozen=True)
class Needs:
    """What a model needs of the memory when it is streamed, beside the weights that stay: the units there are, bytes
    that are needed whatever is streamed, and those of the fewest experts that a step can be computed with."""

    units: tuple[Unit, ...]
    has_table: bool
    fixed_nbytes: int
    experts_nbytes: int

    @property
    def largest_nbytes(self) -> int:
        """Bytes of the largest unit: the smallest ring."""
        return max((unit.nbytes for unit in self.units), default=0)

    @property
    def least_nbytes(self) -> int:
        """The least memory that the model can be streamed in."""
        return self.fixed_nbytes + self.experts_nbytes + self.largest_nbytes


def needs_of(plan: LoadPlan, budget_of: BudgetOf) -> Needs:
    """The needs of a plan in which everything stays, but for experts that are apart."""
    has_table = _keeps_table(plan)
    units = units_of(plan, has_table=has_table)
    whole = StreamPlan(units, frozenset(unit.name for unit in units), 0, has_table)
    weights = sum(spec.nbytes for unit in units for spec in unit.storage.values())
    fixed = budget_of(without_units(plan, whole)).peak_nbytes - weights
    return Needs(units, has_table, fixed, _least_experts_nbytes(plan))


def stream_within(
    plan: LoadPlan,
    *,
    limit_nbytes: int,
    budget_of: BudgetOf,
    given_ring_nbytes: int | None = None,
    host_limit_nbytes: int | None = None,
) -> tuple[LoadPlan, Budget]:
    """The same model, with what does not fit into the limit streamed; and its budget.

    `given_ring_nbytes`: of a ring that is there already. `host_limit_nbytes`: of the host's memory beside a GPU's; None
    where nobody knows it. Raises BudgetError with what is needed at the least.
    """
    if plan.experts and (whole := budget_of(plan)).is_on_gpu:
        raise too_small(plan, replace(whole, limit_nbytes=limit_nbytes), more="; experts come and go on the CPU only")
    needs = needs_of(plan, budget_of)
    room = limit_nbytes - needs.fixed_nbytes - needs.experts_nbytes
    ring, kept = _shared_out(needs.units, room, given_ring_nbytes)
    if ring > room:
        stay = needs.least_nbytes - needs.largest_nbytes
        raise BudgetError(
            f"{budget_of(plan).flag} {format_size(limit_nbytes)} is too small even to stream the weights: "
            f"{format_needed(stay + (given_ring_nbytes or needs.largest_nbytes))} are needed "
            f"({format_size(needs.largest_nbytes)} for the largest of them, {format_size(stay)} for what has to stay); "
            "try a smaller --max-model-len, a smaller --window, or --kv-cache-dtype int8"
        )
    left = room - ring - sum(unit.nbytes for unit in needs.units if unit.name in kept)
    experts = needs.experts_nbytes + _for_experts(plan, left) if plan.experts else 0
    stream = StreamPlan(needs.units, kept, ring, needs.has_table, experts)
    found = without_units(plan, stream)
    budget = budget_of(found)
    if budget.is_on_gpu:
        spared = limit_nbytes - budget.peak_nbytes
        for part in (spared, spared * 3 // 4, spared // 2, spared // 4):
            more = _in_more_room(plan, stream, room + part, given_ring_nbytes)
            if (other := budget_of(more)).peak_nbytes <= limit_nbytes:
                found, budget, stream = more, other, more.stream or stream
                break
        stream = _with_host_tier(stream, budget, host_limit_nbytes)
        found = replace(found, stream=stream)
        budget = replace(budget, staging_nbytes=stream.staging_nbytes, tier_nbytes=stream.tier_nbytes)
    return found, replace(budget, limit_nbytes=limit_nbytes)


def _in_more_room(plan: LoadPlan, stream: StreamPlan, room: int, given_ring: int | None) -> LoadPlan:
    """The plan with more that stays: on a GPU what is loaded with the layers takes room once more on its way in, and
    the largest weights, by which that was reckoned, may be among those that are streamed."""
    ring, kept = _shared_out(stream.units, room, given_ring)
    return without_units(plan, replace(stream, kept=kept, ring_nbytes=ring))


def _with_host_tier(stream: StreamPlan, budget: Budget, limit: int | None) -> StreamPlan:
    """The plan with the units that the host keeps for a GPU, in what its own limit leaves beside what all others pass
    through; none where nobody knows a limit. Raises BudgetError where not even that fits."""
    stream = replace(stream, staging_nbytes=staging_nbytes(stream.units))
    if limit is None:
        return stream
    budget = replace(budget, staging_nbytes=stream.staging_nbytes, tier_nbytes=0)
    if budget.host_nbytes > limit:
        raise host_too_small(budget, limit_nbytes=limit)
    return replace(stream, tier=choose_kept(stream.streamed, room_nbytes=limit - budget.host_nbytes))


def staging_nbytes(units: Sequence[Unit]) -> int:
    """Page-locked memory that units pass through on their way to a GPU: one is read while one is copied. It is taken
    when the first one comes that the host does not keep."""
    sizes = [unit.nbytes for unit in units]
    return min(sum(sizes), 2 * max(sizes, default=0))


def _shared_out(units: tuple[Unit, ...], room: int, given_ring: int | None) -> tuple[int, frozenset[str]]:
    """Bytes of the ring, and the units that stay, in so much room."""
    if sum(unit.nbytes for unit in units) + (given_ring or 0) <= room:
        return given_ring or 0, frozenset(unit.name for unit in units)
    ring = ring_nbytes(units, room_nbytes=room) if given_ring is None else given_ring
    return ring, choose_kept(units, room_nbytes=max(0, room - ring))


def _keeps_table(plan: LoadPlan) -> bool:
    """Whether the embedding table has to be in memory: its rows cannot be fetched on their own. (As a head it is not
    looked up.)"""
    return plan.table is None or plan.table.strides is not None


def _least_experts_nbytes(plan: LoadPlan) -> int:
    if not plan.experts:
        return 0
    from streaming.expert_plan import least_expert_nbytes

    return least_expert_nbytes(plan)


def _for_experts(plan: LoadPlan, left_nbytes: int) -> int:
    """What more experts can take, beside the fewest."""
    total = sum(one.unit_nbytes(unit) for one in plan.experts for unit in one.units)
    return max(0, min(left_nbytes, total - _least_experts_nbytes(plan)))

"""The memory a load needs, computed before anything is allocated. Pure.

These make the peak: the parameters that stay in their stored form, the window that bytes pass through, the one wide
item in each of the two stages behind it (only where bytes must be decoded or converted first), the KV cache, the packed
copies of `--kernels fast`, and where not all parameters fit the ring that the others pass through, what is held to make
them, and the experts that are in memory at once.

A GPU has memory of its own, and the host's is another sum: the window, what is decoded there, and where parameters are
streamed the page-locked memory that they pass through, and those that the host keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from layers.weights import ParamKind, ParamSpec
from quant.dtypes import DType
from streaming.checkpoint.tensors import TensorInfo
from streaming.errors import BudgetError
from streaming.plan import LayerPlan, LoadItem, LoadPlan
from streaming.sizes import format_needed, format_size

DEFAULT_WINDOW_NBYTES = 128 << 20
LEAST_STRIPS_NBYTES = 16 << 20  # set aside for the strips of a weight that is quantized anew


@dataclass(frozen=True)
class Budget:
    """Bytes, by source. `limit_nbytes` is what the user granted; None when nothing was said."""

    kept_nbytes: int
    window_nbytes: int
    convert_nbytes: int
    cache_nbytes: int
    limit_nbytes: int | None = None
    packed_nbytes: int = 0
    file_nbytes: int = 0  # bytes of files that the reader holds: a whole one (eager), a back end's buffers
    ring_nbytes: int = 0  # what streamed weights pass through
    experts_nbytes: int = 0  # of experts that come when tokens are routed to them, at the most
    is_on_gpu: bool = False  # the limit is for its memory
    host_convert_nbytes: int = 0  # of the host's beside it, as all of the following
    staging_nbytes: int = 0  # page-locked, for streamed weights on their way
    tier_nbytes: int = 0  # of streamed weights that the host keeps
    flag: str = "--memory"  # the option that the limit is given by

    @property
    def peak_nbytes(self) -> int:
        """The most that is held at once by the model itself in the memory that is computed in; the interpreter's own
        memory is not in it."""
        held = self.kept_nbytes + self.convert_nbytes + self.cache_nbytes + self.packed_nbytes + self.ring_nbytes
        held += self.experts_nbytes
        return held if self.is_on_gpu else held + self.window_nbytes + self.file_nbytes

    @property
    def host_nbytes(self) -> int:
        """The most that is held at once in the host's memory beside a GPU's; 0 on the CPU, where there is one sum."""
        if not self.is_on_gpu:
            return 0
        passing = self.window_nbytes + self.file_nbytes + self.host_convert_nbytes
        return passing + self.staging_nbytes + self.tier_nbytes


def make_budget(
    plan: LoadPlan,
    *,
    window_nbytes: int | None,
    cache_nbytes: int,
    limit_nbytes: int | None = None,
    packs: bool = False,
    device: str = "cpu",
    file_nbytes: int = 0,
    flag: str = "--memory",
) -> Budget:
    """The budget of a plan; `packs`: with packed copies, as the device has them. Raises BudgetError when the limit is
    too small, with what is needed."""
    window = choose_window(plan) if window_nbytes is None else window_nbytes
    staged = sum(item.nbytes for item in plan.items if item.is_staged)
    packed = copies_nbytes(plan, device=device.partition(":")[0]) if packs else 0
    stream = plan.stream
    budget = Budget(
        plan.kept_nbytes, min(window, staged), convert_nbytes(plan), cache_nbytes, limit_nbytes, packed, file_nbytes,
        0 if stream is None else stream.ring_nbytes, 0 if stream is None else stream.experts_nbytes,
    )  # fmt: skip
    budget = replace(budget, flag=flag)
    if device != "cpu":
        budget = replace(
            budget, is_on_gpu=True, convert_nbytes=gpu_convert_nbytes(plan), host_convert_nbytes=budget.convert_nbytes,
            staging_nbytes=0 if stream is None else stream.staging_nbytes,
            tier_nbytes=0 if stream is None else stream.tier_nbytes,
        )  # fmt: skip
    if limit_nbytes is not None and budget.peak_nbytes > limit_nbytes:
        raise too_small(plan, budget)
    return budget


def too_small(plan: LoadPlan, budget: Budget, *, more: str = "") -> BudgetError:
    """That the budget is beyond its limit, with what is needed; `more`: why nothing can be streamed."""
    assert budget.limit_nbytes is not None
    packed, files = budget.packed_nbytes, 0 if budget.is_on_gpu else budget.file_nbytes
    window = "" if budget.is_on_gpu else f"{format_size(budget.window_nbytes)} of window, "
    return BudgetError(
        f"{budget.flag} {format_size(budget.limit_nbytes)} is too small: {format_needed(budget.peak_nbytes)} are "
        f"needed ({format_size(budget.kept_nbytes)} of weights, {window}"
        f"{format_size(budget.convert_nbytes)} for conversion, {format_size(budget.cache_nbytes)} of KV cache"
        f"{f', {format_size(packed)} of packed copies' if packed else ''}"
        f"{f', {format_size(files)} of files that the reader holds' if files else ''}); "
        f"{_ways_out(plan, budget)}{', or leave out --kernels fast' if packed else ''}{more}"
    )


def _ways_out(plan: LoadPlan, budget: Budget) -> str:
    """What would make it smaller."""
    ways = ["a smaller --window"] * (not budget.is_on_gpu) + ["a smaller --max-model-len"]
    if budget.cache_nbytes > budget.kept_nbytes // 4:
        ways.append("--kv-cache-dtype int8")
    if not any(param.kept_as_stored for layer in plan.layers for param in layer.spec.params):
        ways.insert(0, "--quantization")
    return f"try {' or '.join(filter(None, (', '.join(ways[:-1]), ways[-1])))}"


def host_too_small(budget: Budget, *, limit_nbytes: int) -> BudgetError:
    """That the host's memory beside a GPU is too small, with what is needed."""
    passing = budget.window_nbytes + budget.file_nbytes
    least = budget.host_nbytes - budget.tier_nbytes
    return BudgetError(
        f"--host-memory {format_size(limit_nbytes)} is too small: {format_needed(least)} are needed on the host "
        f"({format_size(passing)} of window, {format_size(budget.host_convert_nbytes)} for "
        f"conversion, {format_size(budget.staging_nbytes)} page-locked for weights on their way to the GPU); try a "
        "smaller --window"
    )


def gpu_convert_nbytes(plan: LoadPlan) -> int:
    """What exists on a GPU beside what is stored: one item each in the slice and in the quantize stage, as it was read
    and in wide numbers, what holds a weight until it is quantized anew; and the same of units that are made."""
    found = _passing_nbytes([item for item in plan.items if not item.direct], at_once=2)
    if plan.experts:
        from streaming.expert_plan import FETCHING_THREADS

        items = [item for one in plan.experts for item in one.plan.items]
        found += _passing_nbytes(items, at_once=FETCHING_THREADS)
    if plan.stream is not None and (making := plan.stream.making_threads):
        items = [item for unit in plan.stream.units if not unit.is_straight for item in unit.items]
        found += _passing_nbytes(items, at_once=making)
    return found


def _passing_nbytes(items: Sequence[LoadItem], *, at_once: int) -> int:
    largest = max((item.nbytes + (0 if _is_copied(item) else _wide_nbytes(item)) for item in items), default=0)
    return at_once * largest + max((_arrival_nbytes(item) for item in items if item.completes), default=0)


def choose_window(plan: LoadPlan) -> int:
    """The default look-ahead: room for a few items, so that reading and quantizing overlap; no more than that where
    memory is so short that weights are streamed."""
    least = 2 * plan.largest_staged_nbytes
    return least if plan.stream is not None else max(DEFAULT_WINDOW_NBYTES, least)


def convert_nbytes(plan: LoadPlan) -> int:
    """What exists beside the window: a wide item in the slice stage and one in the quantize stage, their bytes where
    another rank has read them, the copies of one that is turned round as a whole, and a table whose rows are no runs of
    bytes, while the prompt's are picked."""
    wide = 2 * max((_wide_nbytes(item) for item in plan.items if _is_converted(item)), default=0)
    wide += 2 * max((item.nbytes for item in plan.items if item.is_received and not item.direct), default=0)
    wide += max((_arrival_nbytes(item) for item in plan.items if item.completes), default=0)
    wide += max((_turned_nbytes(item) for item in plan.items), default=0) + _picked_nbytes(plan.table)
    if plan.experts:
        from streaming.expert_plan import FETCHING_THREADS

        wide += FETCHING_THREADS * _fetched_nbytes([item for one in plan.experts for item in one.plan.items])
    if plan.stream is not None:
        units = plan.stream.units
        wide += plan.stream.making_threads * _fetched_nbytes([item for unit in units for item in unit.items])
    return wide


def _fetched_nbytes(items: Sequence[LoadItem]) -> int:
    """What a thread holds that loads any of these apart from the layers: one, as it was read and on its way."""
    most = max(
        (_turned_nbytes(one) + (_wide_nbytes(one) if _is_converted(one) else 0) + (0 if one.direct else one.nbytes)
         for one in items),
        default=0,
    )  # fmt: skip
    return most + max((_arrival_nbytes(item) for item in items if item.completes), default=0)


def passing_nbytes(layer: LayerPlan) -> int:
    """What a layer takes on a device at the most while it passes, beside what is stored: one item each in the slice and
    in the quantize stage, as it was read and in wide numbers, and what holds a weight until it is quantized anew."""
    largest = max((item.nbytes + _wide_nbytes(item) for item in layer.items), default=0)
    return 2 * largest + max((_arrival_nbytes(item) for item in layer.items if item.completes), default=0)


def _is_copied(item: LoadItem) -> bool:
    """Whether its bytes on a GPU are its numbers, and those what is stored."""
    return not (_is_converted(item) or item.param.is_quantized or item.tensor.dtype is not item.param.dtype)


def _is_converted(item: LoadItem) -> bool:
    if item.leaf or item.stored is not None:
        return False
    if item.param.is_cut_within:  # what is cut out of rows, or made beside what other ranks have of a block
        return item.param.is_quantized or bool(item.picked or item.columns)
    return not item.tensor.is_plain and item.param.scheme.name != "none"  # others are views, or written to their place


def _arrival_nbytes(item: LoadItem) -> int:
    """What holds a weight in its form on disk until it is whole, where it is quantized anew, and its wide rows then."""
    param = item.param
    if param.is_cut_within:
        return _held_nbytes(item)
    if param.kept_as_stored:
        return 0
    rows = param.run_rows[param.run_at(item.section)]
    held = sum(spec.nbytes for spec in item.form.kept.storage((rows,), param.shape[1], wide=param.dtype).values())
    wide = rows * param.shape[1] * param.dtype.itemsize
    if param.scheme.row_multiple == 0:
        return held + wide
    from quant.requantize import strips_nbytes

    strips = strips_nbytes(item.form.kept, param.scheme, param.shape[1])
    return held + min(wide, max(LEAST_STRIPS_NBYTES, strips))


def _held_nbytes(item: LoadItem) -> int:
    """What is held of a weight that is cut, until this rank's part can be made; and what is made whole, then cut."""
    if not item.held:
        return 0
    param, whole = item.param, item.param.whole
    storage = item.form.kept.storage((whole.run_rows[item.disk_run],), whole.shape[1], wide=whole.dtype)
    held = sum(spec.nbytes for spec in storage.values())
    if whole.kept_as_stored:
        return held if item.fills == "weight" else storage[item.fills].nbytes
    from layers.cuts import scale_scope
    from quant.section_cuts import Scope

    scopes = {scale_scope(param, section) for section in range(item.section, item.section + item.sections)}
    rows = max(whole.section_rows) if scopes != {Scope.OWN} else max(param.section_rows)
    return held + 2 * rows * whole.shape[1] * whole.dtype.itemsize


def _wide_nbytes(item: LoadItem) -> int:
    width = item.tensor.shape[1:] if item.param.is_cut_within else item.param.shape[1:]
    return (item.rows[1] - item.rows[0]) * prod(width) * DType.F32.itemsize


def _turned_nbytes(item: LoadItem) -> int:
    """Copies of a tensor that is read whole, in the other byte order, and of one of a quantized weight that is decoded
    and stored, one after the other."""
    info = item.tensor
    if item.leaf:
        return 0 if info.is_plain else 2 * item.nbytes
    return item.nbytes if info.strides is not None and info.big_endian else 0


def _picked_nbytes(table: TensorInfo | None) -> int:
    return 0 if table is None or table.strides is None else table.nbytes + table.numel * table.dtype.itemsize


def copies_nbytes(plan: LoadPlan, *, device: str = "cpu") -> int:
    """Packed copies of every layer, and what is held while one layer's are made: each weight twice more. `device`:
    "cpu" or "cuda"."""
    layers = [sum(_packed_nbytes(param, device) for param in layer.spec.params) for layer in plan.layers]
    return sum(layers) + 2 * max(layers, default=0)


def _packed_nbytes(param: ParamSpec, device: str) -> int:
    if param.kind is not ParamKind.LINEAR:
        return 0
    from quant.packed import packed_nbytes, reads_packed

    if not reads_packed(param.scheme, param.dtype):
        return 0
    return packed_nbytes(param.scheme, param.section_rows, param.shape[1], device=device)

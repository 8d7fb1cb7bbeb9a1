"""`--moe-load routed_first` as data: the experts' items apart from the layers', in units that can be loaded alone.

What tokens are routed to is known only when a layer's router has computed. So a layer's plan keeps everything but its
experts' weights; these become a layer of the plan by themselves ("layers.3.experts"), of which any unit can be loaded
at any time. A unit is one expert, or several where a tensor, or a form on disk, holds them as one. [no-torch]
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, count

from layers.cuts import scale_scope
from layers.weights import LayerSpec, ParamKind, ParamSpec
from quant.scheme import StoredSpec
from quant.shared_scales import Scope
from streaming.errors import OptionError
from streaming.load_plan import LayerPlan, LoadItem, LoadPlan
from streaming.options import LoadOptions
from streaming.read_strategy import BACK_ENDS

FETCHING_THREADS = 4  # that load units; the budget counts what each of them holds
PAGE_NBYTES = mmap.PAGESIZE  # in which the system gives memory to experts that come and go


@dataclass(frozen=True)
class StoredRun:
    """A stored tensor of all experts of a layer, and where it begins in the address space of the layer: at a page."""

    param: str
    name: str
    spec: StoredSpec
    offset: int


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of decoder layer `of`: `plan` is theirs alone, its items unit after unit. `firsts` are the first
    expert of each unit (in this rank's own numbers), `starts` its first item; both end with how many there are."""

    of: str
    plan: LayerPlan
    firsts: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def units(self) -> range:
        """The numbers of the units."""
        return range(len(self.firsts) - 1)

    def unit_of(self, expert: int) -> int:
        """The unit that an expert is loaded with."""
        return bisect_right(self.firsts, expert) - 1

    def items_of(self, unit: int) -> tuple[LoadItem, ...]:
        """What fills a unit, in the order in which it is loaded."""
        return self.plan.items[self.starts[unit] : self.starts[unit + 1]]

    @cached_property
    def runs(self) -> tuple[StoredRun, ...]:
        """The stored tensors of all its experts, one behind the other."""
        found, end = [], 0
        for param in self.plan.spec.params:
            for name, spec in param.storage().items():
                found.append(StoredRun(param.name, name, spec, end))
                end += -(-spec.nbytes // PAGE_NBYTES) * PAGE_NBYTES
        return tuple(found)

    def spans(self, unit: int) -> Iterator[tuple[int, int]]:
        """Bytes [start, stop) of `runs` that a unit takes: of each that it takes any of."""
        first, stop, total = self.firsts[unit], self.firsts[unit + 1], self.firsts[-1]
        for run in self.runs:
            each = run.spec.nbytes // total
            if each:
                yield run.offset + first * each, run.offset + stop * each

    def unit_nbytes(self, unit: int) -> int:
        """What a unit takes in memory, in whole pages; one that it shares with its neighbour is counted for both."""
        return PAGE_NBYTES * sum(-(-stop // PAGE_NBYTES) - start // PAGE_NBYTES for start, stop in self.spans(unit))


def least_expert_nbytes(plan: LoadPlan) -> int:
    """The least capacity with which experts can come and go: that of the largest unit, as each is computed alone
    then. 0 where none are loaded apart from their layers."""
    return max((layer.unit_nbytes(unit) for layer in plan.experts for unit in layer.units), default=0)


def with_experts_apart(plan: LoadPlan, options: LoadOptions) -> LoadPlan:
    """The same load with its experts apart.

    Without experts it stays as it is, with a warning. Raises OptionError for what cannot be loaded by experts.
    """
    if not any(map(is_of_experts, _params(plan))):
        note = "--moe-load routed_first: the model has no experts, so it is loaded layer by layer"
        return replace(plan, warnings=(*plan.warnings, note))
    _check(plan, options)
    numbers = count()
    layers = tuple(_base(layer, numbers) for layer in plan.layers)
    experts = tuple(_experts(layer, numbers) for layer in plan.layers if any(map(is_of_experts, layer.spec.params)))
    return replace(plan, layers=layers, experts=experts)


def is_of_experts(param: ParamSpec) -> bool:
    """Whether it is a projection of all experts of a layer. Their biases, a few numbers, come with the layer."""
    return param.sharding.experts > 0 and param.kind is ParamKind.LINEAR


def _params(plan: LoadPlan) -> Iterator[ParamSpec]:
    return (param for layer in plan.layers for param in layer.spec.params)


def _check(plan: LoadPlan, options: LoadOptions) -> None:
    option = "--moe-load routed_first"
    if options.safetensors_load_strategy == "eager":
        raise OptionError(f"{option} does not go with --safetensors-load-strategy eager, which reads whole files")
    if options.load_format in BACK_ENDS:
        raise OptionError(
            f"{option} does not go with --load-format {options.load_format}, whose package reads in its own order"
        )
    if options.remote_cache is not None:
        raise OptionError(f"{option} does not go with --remote-cache, which fetches whole files")
    for param in filter(is_of_experts, _params(plan)):
        if any(scale_scope(param, section) is Scope.MAXIMA for section in range(_each(param))):
            raise OptionError(
                f"{option}: ranks would have to agree on scales of {param.name} in an order that they do not share; "
                "--enable-expert-parallel keeps each expert on one rank"
            )


def _base(layer: LayerPlan, numbers: Iterator[int]) -> LayerPlan:
    params = tuple(param for param in layer.spec.params if not is_of_experts(param))
    items = tuple(replace(item, index=next(numbers)) for item in layer.items if not is_of_experts(item.param))
    return LayerPlan(layer.name, LayerSpec(layer.name, params), items)


def _experts(layer: LayerPlan, numbers: Iterator[int]) -> ExpertLayer:
    params = tuple(filter(is_of_experts, layer.spec.params))
    total = len(params[0].sections) // _each(params[0])
    items = [part for item in layer.items if is_of_experts(item.param) for part in _by_expert(item, total)]
    firsts = _unit_firsts([_experts_of(item) for item in items], total=total)
    units: list[list[LoadItem]] = [[] for _ in range(len(firsts) - 1)]
    name = f"{layer.name}.experts"
    for item in items:
        units[bisect_right(firsts, _experts_of(item)[0]) - 1].append(item)
    ordered = tuple(replace(item, index=next(numbers), layer=name) for unit in units for item in unit)
    starts = tuple(accumulate((len(unit) for unit in units), initial=0))
    return ExpertLayer(layer.name, LayerPlan(name, LayerSpec(name, params), ordered), tuple(firsts), starts)


def _each(param: ParamSpec) -> int:
    """Sections of one expert."""
    return len(param.whole.sections) // param.sharding.experts


def _by_expert(item: LoadItem, total: int) -> Iterator[LoadItem]:
    """Of rows of a stored tensor, as save-shards writes them, those of each of the `total` experts."""
    if item.stored is None:
        yield item
        return
    step, each, (start, last) = item.tensor.shape[0] // total, _each(item.param), item.rows
    while start < last:
        expert = start // step
        stop = min(last, (expert + 1) * step)
        rows = (start, stop)
        yield replace(item, rows=rows, section_rows=rows, section=expert * each, sections=each)
        start = stop


def _experts_of(item: LoadItem) -> tuple[int, int]:
    """The experts [first, stop) that an item is part of."""
    each = _each(item.param)
    return item.section // each, -(-(item.section + item.sections) // each)


def _unit_firsts(spans: Iterable[tuple[int, int]], *, total: int) -> Sequence[int]:
    """The first expert of each unit, and the number of experts: no item reaches over the edge of a unit."""
    joined = {expert for first, stop in spans for expert in range(first + 1, stop)}
    return [expert for expert in range(total) if expert not in joined] + [total]

"""The modules that a quantized folder has: how each parameter is divided and what its parts are called. [no-torch]

They bear the names that the family's checkpoints have, so a fused parameter is its parts (q_proj, k_proj, v_proj), each
with its own scales; what the family's own modules keep in one (phi3's qkv_proj) stays in one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from layers.architecture import EMBED_WEIGHT, HEAD_WEIGHT
from layers.config import weight_map
from layers.fused_experts import EXPERTS
from layers.weights import ParamSpec
from streaming.compressed_layout import layout_of
from streaming.errors import OptionError
from streaming.plan import LayerPlan, LoadItem
from streaming.prepare import Prepared

_FUSED = ("qkv_proj", "gate_up_proj")
_ONE_MODULE = {"phi3": _FUSED, "glm": ("gate_up_proj",), "glm4": ("gate_up_proj",)}  # there they are one module
_NAMED = 3  # modules that a message names one by one


@dataclass(frozen=True)
class Module:
    """A module of the checkpoint: the sections [first, stop) of a parameter, whose tensor is `name`.`leaf`."""

    name: str
    leaf: str
    param: ParamSpec
    first: int
    stop: int

    @property
    def section_rows(self) -> tuple[int, ...]:
        """Rows of each of its sections."""
        return self.param.section_rows[self.first : self.stop]

    @cached_property
    def parts(self) -> range | None:
        """Which of the parts that the scheme treats by themselves it is; None where one reaches over its edge."""
        ends = [0, *accumulate(self.param.kept_rows)]
        start, stop = self.param.section_starts[self.first], self.param.section_starts[self.stop]
        return range(ends.index(start), ends.index(stop)) if start in ends and stop in ends else None

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each of those parts; of each section where there is no telling."""
        return self.section_rows if self.parts is None else tuple(self.param.kept_rows[part] for part in self.parts)

    @property
    def is_quantized(self) -> bool:
        """Whether it is not written as its wide numbers."""
        return self.param.is_quantized


def modules_of(layer: LayerPlan, prepared: Prepared) -> Iterator[Module]:
    """The modules of a layer, in the order of its parameters."""
    whole = _ONE_MODULE.get(str(prepared.checkpoint.config.get("model_type")), ())
    items: dict[str, list[LoadItem]] = {}
    for item in layer.items:
        items.setdefault(item.param.name, []).append(item)
    for param in layer.spec.params:
        names = _names(items[param.name], prepared)
        last = param.name.split(".")[-2]
        if EXPERTS in param.name:
            yield from _experts(param, names, prepared)
        elif last in _FUSED:
            yield from _usual_parts(param, names[0], prepared, whole=last in whole)
        elif param.name in (EMBED_WEIGHT, HEAD_WEIGHT):  # a tied matrix may lie under either name
            own = names[0].endswith(param.name.removeprefix("model."))
            yield _module(names[0] if own else param.name, param, 0, 1)
        else:
            yield from _parts_on_disk(param, names)


def _names(items: Iterable[LoadItem], prepared: Prepared) -> dict[int, str]:
    """The name of the tensor that each section begins in; that of the weight, where it is quantized on disk."""
    unwrapped = {there: name for name, there in prepared.plan.unwrapped.items()}
    found = {}
    for item in items:
        name = unwrapped.get(item.tensor.name, item.tensor.name)
        first = f"{name.rpartition('.')[0]}.weight" if item.leaf else name
        found.update(dict.fromkeys(range(item.section, item.section + item.sections), first))
    return found


def _experts(param: ParamSpec, names: Mapping[int, str], prepared: Prepared) -> Iterator[Module]:
    """A module for each expert and part: as this checkpoint has them, or the family, where they are one tensor here."""
    projection = param.name.split(".")[-2]
    rules = [r for r in weight_map(prepared.config).experts if r.target == projection and r.stop - r.first == 1]
    usual = {rule.first: rule.source for rule in reversed(rules)}  # the first rule of each part is the family's own
    parts = {rule.source: rule.first for rule in rules}
    for section in range(len(param.sections)):
        expert, part = divmod(section, rules[0].of)
        before, _, behind = names[section].partition(EXPERTS)
        last = behind.split(".")[-2] if behind.count(".") > 1 else ""
        source = last if parts.get(last) == part else usual[part]
        yield Module(f"{before}{EXPERTS}{expert}.{source}", "weight", param, section, section + 1)


def _module(name: str, param: ParamSpec, first: int, stop: int) -> Module:
    module, _, leaf = name.rpartition(".")
    return Module(module, leaf, param, first, stop)


def _usual_parts(param: ParamSpec, name: str, prepared: Prepared, *, whole: bool) -> Iterator[Module]:
    """The parts of a fused parameter as the family's modules have them, whatever this checkpoint does."""
    module, _, leaf = name.rpartition(".")
    parent, target = module.rpartition(".")[0], param.name.split(".")[-2]
    if whole:
        yield Module(f"{parent}.{target}", leaf, param, 0, len(param.sections))
        return
    for rule in weight_map(prepared.config).stacked:
        if rule.target == target and rule.source != target:
            yield Module(f"{parent}.{rule.source}", leaf, param, rule.first, rule.stop)


def _parts_on_disk(param: ParamSpec, names: Mapping[int, str]) -> Iterator[Module]:
    starts = [section for section in sorted(names) if names.get(section - 1) != names[section]]
    for first, stop in zip(starts, [*starts[1:], len(param.sections)], strict=True):
        yield _module(names[first], param, first, stop)


def check_modules(modules: Iterable[Module]) -> None:
    """Raise OptionError for the quantized modules that have no place in the layout."""
    faults = [fault for module in modules if module.is_quantized for fault in _faults(module)]
    if faults:
        more = f"; {len(faults) - _NAMED} more like these" if len(faults) > _NAMED else ""
        raise OptionError(f"--quantization: cannot be written: {'; '.join(faults[:_NAMED])}{more}")


def _faults(module: Module) -> Iterator[str]:
    scheme, columns = module.param.scheme, module.param.shape[1]
    layout = layout_of(scheme)
    if module.parts is None:
        yield f"{module.name} shares its scales with its neighbours on disk"
    if columns % layout.columns:
        yield f"{module.name} has {columns} inputs, and {scheme.name} needs a multiple of {layout.columns} there"
    if len(module.rows) > 1 and layout.row_multiple == 0:
        yield f"{module.name} is one tensor of {len(module.rows)} parts, and {scheme.name} has one scale for it there"
    elif layout.row_multiple and any(rows % layout.row_multiple for rows in module.rows[:-1]):
        yield f"{module.name} is one tensor whose parts of {list(module.rows)} rows share blocks of {scheme.name} there"

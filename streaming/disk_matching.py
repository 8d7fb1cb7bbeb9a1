"""Weights that are quantized on disk: the form of each, how it is kept, which tensors it is made of. [no-torch]"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from layers.weights import Dropped, LayerSpec, ParamKind, ParamSpec, Target
from quant.disk_forms.form import (
    DiskForm,
    DiskTensor,
    FoundTensor,
    Method,
    PartedForm,
    RenamesLeaves,
    disk_tensors,
)  # fmt: skip
from quant.errors import QuantError
from quant.float8 import FLOAT8_SCHEMES
from quant.microscaling import MxFp8
from quant.scheme import Scheme
from quant.wide import Wide
from streaming.checkpoint.tensors import TensorInfo
from streaming.stated_quantization import SIDE_FILES

# The ends of the names of codes -> those of their scales, one of which is there.
_CODES = {
    "weight": ("weight_scale_inv", "weight_scale", "weight.absmax", "SCB"),
    "qweight": ("scales",),
    "weight_packed": ("weight_scale",),
}
_QUANTIZED = (ParamKind.LINEAR, ParamKind.HEAD, ParamKind.ABSORBED)
_SHOWN = 8  # shapes that a message lists
Group = tuple[str, Mapping[str, TensorInfo]]  # a module's name in the checkpoint, and its tensors there by leaf


@dataclass(frozen=True)
class OnDisk:
    """The model's layers with the forms that a checkpoint has for their weights; what is wrong, what to tell."""

    specs: tuple[LayerSpec, ...]
    problems: Mapping[str, str]  # by the module's name in the checkpoint
    notes: tuple[str, ...] = ()


@dataclass
class _Found:
    problems: dict[str, str] = field(default_factory=dict)
    mixed: list[str] = field(default_factory=list)
    forms: dict[DiskForm, DiskForm] = field(default_factory=dict)  # equal ones are one, which compares at once
    unlike: dict[str, str] = field(default_factory=dict)  # form on disk -> the first weight that cannot be requantized


def find_forms(
    tensors: Mapping[str, TensorInfo],
    specs: Sequence[LayerSpec],
    *,
    located: Mapping[str, Target | Dropped],
    method: Method,
) -> OnDisk:
    """Give every linear weight the form in which the checkpoint holds it. `located`: where each tensor goes.

    It is kept as it is there, or quantized anew where its scheme was asked for; where the parts of a fused weight are
    of several forms they are dequantized, and it is kept wide. What the configuration excludes is not quantized.
    """
    groups = _groups(tensors, specs, located)
    found = _Found()

    def with_forms(param: ParamSpec) -> ParamSpec:
        runs = groups.get(param.name, {})
        return _with_forms(param, runs, method, found) if runs else param

    made = tuple(replace(spec, params=tuple(map(with_forms, spec.params))) for spec in specs)
    return OnDisk(made, found.problems | _unlike_problems(found), tuple(_notes(found)))


def _groups(
    tensors: Mapping[str, TensorInfo], specs: Sequence[LayerSpec], located: Mapping[str, Target | Dropped]
) -> dict[str, dict[tuple[int, int], Group]]:
    """parameter -> (first section, stop) -> the module and its tensors, by leaf."""
    linear = {p.name.rpartition(".")[0]: p.name for spec in specs for p in spec.params if p.kind in _QUANTIZED}
    groups: dict[str, dict[tuple[int, int], tuple[str, dict[str, TensorInfo]]]] = defaultdict(dict)
    for name, info in tensors.items():
        target = located[name]
        if isinstance(target, Dropped):
            continue
        param = linear.get(target.param.rpartition(".")[0])
        if param is not None:
            module, _, leaf = name.rpartition(".")
            groups[param].setdefault((target.first, target.stop), (module, {}))[1][leaf] = info
    return {param: dict(runs) for param, runs in groups.items()}


def _with_forms(param: ParamSpec, runs: Mapping[tuple[int, int], Group], method: Method, found: _Found) -> ParamSpec:
    forms: list[DiskForm | None] = []
    counts: list[int] = []
    for first, stop in _tiled(runs, len(param.sections)):
        rows = param.section_rows[first:stop]
        form = _form_of(runs.get((first, stop)), (sum(rows), param.shape[1]), method, found)
        forms.append(form if form is None or len(rows) == 1 else _of_parts(form, rows))
        counts.append(stop - first)
    asked = param.scheme.name != "none"
    excluded = asked and any(method.excludes(module) for module, _ in runs.values())
    if not any(forms):
        return replace(param, scheme=Wide()) if excluded else param
    scheme = _scheme_of(param, forms, excluded=excluded, found=found)
    return replace(param, scheme=scheme, forms=tuple(forms), runs=tuple(counts))


def _of_parts(form: DiskForm, rows: tuple[int, ...]) -> DiskForm:
    found: object = form  # what is a DiskForm may be a PartedForm besides
    return found.with_parts(rows) if isinstance(found, PartedForm) else form


def _tiled(runs: Iterable[tuple[int, int]], sections: int) -> Iterator[tuple[int, int]]:
    """The runs in order, with one for each section that none of them covers."""
    at = 0
    for first, stop in sorted(run for run in runs if run[1] <= sections):
        yield from ((section, section + 1) for section in range(at, first))
        if first >= at:
            yield first, stop
            at = stop
    yield from ((section, section + 1) for section in range(at, sections))


def _form_of(group: Group | None, shape: tuple[int, int], method: Method, found: _Found) -> DiskForm | None:
    if group is None:
        return None
    module, tensors = group
    try:
        form = method.form_of(module, {leaf: FoundTensor(i.shape, i.dtype) for leaf, i in tensors.items()}, shape)
    except QuantError as error:
        found.problems[module] = f"{module}: {error}"
        return None
    return None if form is None else found.forms.setdefault(form, form)


def _scheme_of(param: ParamSpec, forms: Sequence[DiskForm | None], *, excluded: bool, found: _Found) -> Scheme:
    if param.kind is ParamKind.ABSORBED:
        return Wide()
    kept = {form.kept for form in forms if form is not None}
    asked = param.scheme.name != "none" and not excluded
    if asked:
        for form in forms:
            if form is not None and not _has_wide_origin(form.kept):
                found.unlike.setdefault(form.name, param.name)
        return param.scheme
    if len(kept) == 1 and all(forms):
        return kept.pop()
    found.mixed.append(param.name)
    return Wide()


def _has_wide_origin(scheme: Scheme) -> bool:
    """Whether the wide numbers are near enough to what was quantized to be quantized another way: 8-bit floats are."""
    return isinstance(scheme, (*FLOAT8_SCHEMES, MxFp8))


def _unlike_problems(found: _Found) -> dict[str, str]:
    return {
        param: f"{param} is already quantized on disk ({form}): leave --quantization out, or load the original"
        for form, param in found.unlike.items()
    }


def _notes(found: _Found) -> Iterator[str]:
    if found.mixed:
        more = f" and {len(found.mixed) - 1} more" if len(found.mixed) > 1 else ""
        yield (
            f"{found.mixed[0]}{more}: its parts are on disk in several forms, which one product cannot read: kept wide"
        )


def read_as_leaves(tensors: Mapping[str, TensorInfo], method: Method) -> dict[str, TensorInfo] | None:
    """The tensors by names of which the last word is the leaf, where the method's have more; None where none has."""
    stated: object = method  # what is a Method may be a RenamesLeaves besides
    if not isinstance(stated, RenamesLeaves):
        return None
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        module, dot, rest = name.partition(".weight.")
        leaf = stated.leaves.get(f"weight.{rest}") if dot else None
        plain = name if leaf is None else f"{module}.{leaf}"
        found[name if plain in tensors else plain] = info
    return None if found.keys() == tensors.keys() else found


def unstated_quantization(tensors: Mapping[str, TensorInfo]) -> str | None:
    """What to tell of a checkpoint without a quantization_config that holds codes with scales; None where it holds
    none."""
    found = []
    for name, info in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf in _CODES and not info.dtype.is_wide:
            scale = next((one for one in _CODES[leaf] if f"{module}.{one}" in tensors), None)
            if scale is not None:
                found.append(f"{info.name} is {info.dtype.value} with {scale}")
    if not found:
        return None
    more = f" and {len(found) - 1} more weights are so" if len(found) > 1 else ""
    return (
        f"{found[0]}{more}: the checkpoint is quantized, but nothing says how: config.json has no quantization_config "
        f"and none of {', '.join(SIDE_FILES)} is beside it"
    )


# --- tensors to their places


def coded_problem(info: TensorInfo, wanted: DiskTensor, form: DiskForm) -> str | None:
    """What is wrong with one tensor of a form, from its header; None where nothing is. `wanted`: what it is to be."""
    if info.shape in wanted.shapes and info.dtype in wanted.dtypes:
        return None
    where = f"{info.name} in {info.file.name}"
    if info.shape not in wanted.shapes:
        return f"{where}: shape {list(info.shape)}, but {form.name} makes it {_either(wanted.shapes)}"
    dtypes = " or ".join(dtype.value for dtype in wanted.dtypes)
    return f"{where}: dtype {info.dtype.value}, but {form.name} makes it {dtypes}"


def _either(shapes: Sequence[tuple[int, ...]]) -> str:
    """All of them; of a text, whose length is open, the shortest and the longest."""
    shown = [str(list(shape)) for shape in shapes]
    return " or ".join(shown) if len(shown) <= _SHOWN else f"one of {shown[0]} to {shown[-1]}"


def missing_leaves(form: DiskForm, there: Iterable[str], shape: tuple[int, int]) -> list[str]:
    """The tensors that a form needs and that are not there."""
    return [one.leaf for one in disk_tensors(form, *shape) if not one.optional and one.leaf not in there]

"""Names to homes: which checkpoint tensor fills which section of which parameter, and every fault found. [no-torch]

Every tensor is given a home (a parameter's section, or a reason to be dropped), and every section is asked whether it
has a source. Nothing is read but the few small tensors that may be dropped for what they hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layers.name_lookup import NameLookup
from layers.weights import Dropped, LayerSpec, ParamSpec, Target, WeightMap
from quant.disk_forms.form import disk_tensors
from quant.dtypes import DType
from quant.int4 import IntPerGroup
from streaming.checkpoint.tensors import TensorInfo

if TYPE_CHECKING:
    from quant.disk_forms.form import Method
    from streaming.leftovers import ReadTensor

_TIED = ("model.embed_tokens.weight", "lm_head.weight")
_WEIGHT_LEAVES = (".weight", ".qweight", ".weight_packed")  # what the names of weights, quantized ones too, end with
_NAMED = 3  # tensors that a warning names one by one
_EXPLAINED = 40  # tensors without a home whose nearest names are looked for: a wrong family has a hundred thousand
_NUMBER = re.compile(r"\.\d+\.")


@dataclass
class Sources:
    """Which tensor fills which section: parts[parameter][section] = (tensor, first row of the section in it), and
    which make up which run of sections that is quantized on disk: coded[parameter][run][leaf].

    `dropped` and `homeless` go by the tensors' names in their files: dropped for a reason; without any.
    """

    parts: dict[str, dict[int, tuple[TensorInfo, int]]] = field(default_factory=dict)
    coded: dict[str, dict[int, dict[str, TensorInfo]]] = field(default_factory=dict)  # parameter -> run -> leaf
    dropped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    homeless: dict[str, str] = field(default_factory=dict)
    unwrapped: dict[str, str] = field(default_factory=dict)  # names as a wrapper's were read -> on disk
    specs: tuple[LayerSpec, ...] = ()  # the model's layers, with the forms that quantized weights have on disk
    unreadable: dict[str, str] = field(default_factory=dict)  # a module that is quantized on disk -> what is wrong

    @property
    def problems(self) -> tuple[str, ...]:
        """Every fault found, one line each."""
        told = tuple(f"{module}." for module in self.unreadable)
        others = [*self.missing, *self.mismatched, *self.homeless.values()]
        return (*self.unreadable.values(), *(line for line in others if not told or not line.startswith(told)))


@dataclass(frozen=True)
class Matching:
    """How names are matched. `tied`: embedding and head are one matrix, stored under either name.

    `read` gives the bytes of the few small tensors without a home that may be dropped for what they hold. `group_size`:
    of the checkpoint's quantization, if it names one. `strict`: a tensor without a home is a fault, and not a warning.
    """

    weight_map: WeightMap
    tied: bool
    read: ReadTensor
    group_size: int | None = None
    method: Method | None = None  # by which the checkpoint says that its weights are quantized
    strict: bool = True
    unwrap: bool = False  # read names that a training wrapper changed; else the report says what would make them match


def match_names(tensors: Mapping[str, TensorInfo], specs: Sequence[LayerSpec], how: Matching) -> Sources:
    """Give every tensor its home.

    Names that a wrapper changed are read without its words where that makes all of them match; a note says so. What
    only a training process leaves behind (TRAINING_WORDS) is read so when that is asked for: such a file is more often
    a snapshot of a run than a model to be served.
    """
    if how.method is not None:
        from streaming.disk_matching import read_as_leaves

        if (renamed := read_as_leaves(tensors, how.method)) is not None:
            found = _match_names(renamed, specs, how)
            found.unwrapped = found.unwrapped or {name: info.name for name, info in renamed.items()}
            return found
    return _match_names(tensors, specs, how)


def _match_names(tensors: Mapping[str, TensorInfo], specs: Sequence[LayerSpec], how: Matching) -> Sources:
    plain = _match(tensors, specs, how)
    if not plain.problems:
        return plain
    if how.method is None:
        from streaming.disk_matching import unstated_quantization

        if unstated := unstated_quantization(tensors):
            return Sources(mismatched=[unstated])
    from streaming.wrappers import TRAINING_WORDS, unwrappings

    for what, unwrapped in unwrappings(tensors):
        found = _match(unwrapped, specs, how)
        if not found.problems and not how.unwrap and any(f"'{word}.'" in what for word in TRAINING_WORDS):
            return Sources(mismatched=[f"{what} in the tensors' names; --unwrap-names reads them as if it were not so"])
        if not found.problems:
            found.notes.append(f"{what} in the tensors' names: read as if it were not so")
            found.unwrapped.update((name, info.name) for name, info in unwrapped.items())
            return found
    return plain if how.strict else _without_homeless(plain)


def _without_homeless(found: Sources) -> Sources:
    """Tensors without a home are only told of."""
    if found.homeless:
        names = list(found.homeless)
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        found.notes.append(f"not used, for the model has no such parameter: {', '.join(names[:_NAMED])}{more}")
        found.dropped.update(dict.fromkeys(names, "the model has no such parameter (enable_weights_track is false)"))
        found.homeless.clear()
    return found


def _match(tensors: Mapping[str, TensorInfo], specs: Sequence[LayerSpec], how: Matching) -> Sources:
    found = Sources(specs=tuple(specs))
    if how.weight_map.experts:
        from streaming.expert_tensors import by_expert

        tensors = by_expert(
            tensors,
            specs,
            usually_transposed=how.weight_map.fused_transposed,
            interleaved=how.weight_map.fused_interleaved,
        )
    lookup = NameLookup(how.weight_map)
    located = {name: lookup.locate(name) for name in tensors}
    if how.method is not None:
        from streaming.disk_matching import find_forms

        on_disk = find_forms(tensors, specs, located=located, method=how.method)
        found.specs, found.unreadable = on_disk.specs, dict(on_disk.problems)
        found.notes += on_disk.notes
    params = {param.name: param for spec in found.specs for param in spec.params}
    coded = {param.name.rpartition(".")[0]: param for param in params.values() if param.forms}
    shared: list[TensorInfo] = []
    for name, info in tensors.items():
        target = located[name]
        if isinstance(target, Dropped):
            found.dropped[info.name] = target.reason
        elif (weight := coded.get(target.param.rpartition(".")[0])) and _place_coded(found, name, info, target, weight):
            continue
        elif target.param in params:
            _place(found, info, target, params[target.param])
        elif how.tied and target.param in _TIED:
            shared.append(info)
        else:
            _place_homeless(found, info, target, params, how)
    if how.tied:
        _share_tied(found, shared, params)
    for param in params.values():
        _find_missing(found, param, how.weight_map)
    return found


# --- tensors with a home --------------------------------------------------------------------------------------------


def _place(found: Sources, info: TensorInfo, target: Target, param: ParamSpec) -> None:
    rows = param.section_rows
    if target.stop > len(rows):
        found.mismatched.append(
            f"{info.name}: parts {target.first} to {target.stop} of {param.name}, which has {len(rows)}"
        )
        return
    if target.transposed and len(info.shape) == 2 and info.encoding is None:
        info = info.transposed()
    wanted = (sum(rows[target.first : target.stop]), *param.shape[1:])
    if info.shape != wanted:
        found.mismatched.append(_wrong_shape(info, wanted, transposed=target.transposed))
    if not info.dtype.is_wide:
        found.mismatched.append(f"{info.name} in {info.file.name}: {_no_numbers(info.dtype)}")
    taken = found.parts.setdefault(param.name, {})
    first_row = 0
    for section in range(target.first, target.stop):
        if section in taken:
            found.mismatched.append(f"{info.name} and {taken[section][0].name} both fill {_part(param, section)}")
        taken[section] = (info, first_row)
        first_row += rows[section]


def _place_coded(found: Sources, name: str, info: TensorInfo, target: Target, param: ParamSpec) -> bool:
    """Whether the tensor is a part of what a weight is on disk in quantized form; then it has its home."""
    from streaming.disk_matching import coded_problem

    if target.stop > len(param.sections):
        return False
    run = param.run_at(target.first)
    form, leaf, shape = param.forms[run], name.rpartition(".")[2], (param.run_rows[run], param.shape[1])
    whole = target.first == param.run_starts[run] and target.stop - target.first == param.runs[run]
    if form is None or not whole:
        return False
    wanted = next((one for one in disk_tensors(form, *shape) if one.leaf == leaf), None)
    if wanted is None:
        return False
    if not wanted.fills:
        found.dropped[info.name] = wanted.unused
        return True
    if problem := coded_problem(info, wanted, form):
        found.mismatched.append(problem)
    taken = found.coded.setdefault(param.name, {}).setdefault(run, {})
    if leaf in taken:
        found.mismatched.append(f"{info.name} and {taken[leaf].name} both fill {_part(param, target.first)}")
    taken[leaf] = info
    return True


def _wrong_shape(info: TensorInfo, wanted: tuple[int, ...], *, transposed: bool) -> str:
    shape, config = list(info.shape), list(wanted)
    if transposed and len(shape) == 2:
        shape, config = shape[::-1], config[::-1]
    return f"{info.name} in {info.file.name}: shape {shape}, but the config makes it {config}"


def _no_numbers(dtype: DType) -> str:
    """What is wrong with a weight that is stored in a dtype of codes."""
    return (
        f"dtype {dtype.value}, but a float weight is needed (F64, F32, F16 or BF16): it holds the codes of a quantized "
        "checkpoint, or no weight at all"
    )


def _part(param: ParamSpec, section: int) -> str:
    name = param.sections[section].name
    return f"part {name!r} of {param.name}" if name else param.name


# --- tensors without one --------------------------------------------------------------------------------------------


def _place_homeless(
    found: Sources, info: TensorInfo, target: Target, params: Mapping[str, ParamSpec], how: Matching
) -> None:
    from streaming.leftovers import leftover_reason

    group_size = _group_size_of(target, params, how)
    reason = leftover_reason(info, target.param, params, read=how.read, group_size=group_size)
    if reason is not None:
        found.dropped[info.name] = reason
        return
    module, _, leaf = target.param.rpartition(".")
    where = f"{info.name} in {info.file.name}"
    if leaf == "bias" and f"{module}.weight" in params and len(info.shape) == 1:
        found.homeless[info.name] = f"{where}: a bias that is not zero, but the config gives {module} none"
    elif leaf == "g_idx" and f"{module}.weight" in params:
        found.homeless[info.name] = f"{where}: an order of groups (g_idx) that is not the usual one, i // group_size"
    else:
        hints = _hints(target.param, params) if len(found.homeless) < _EXPLAINED else ""
        found.homeless[info.name] = f"{where}: no parameter of the model is called so{hints}"


def _group_size_of(target: Target, params: Mapping[str, ParamSpec], how: Matching) -> int | None:
    """Inputs that share a scale, 0 or less where all of a row do: by the weight's own form, else by the checkpoint."""
    param = params.get(f"{target.param.rpartition('.')[0]}.weight")
    form = param.form_at(target.first) if param and target.stop <= sum(param.runs) else None
    return form.kept.group_size if form is not None and isinstance(form.kept, IntPerGroup) else how.group_size


def _hints(name: str, params: Mapping[str, ParamSpec]) -> str:
    """The nearest names that there are in its layer or in none, and what the module that it would belong to has."""
    import difflib

    module = name.rpartition(".")[0]
    layer = _NUMBER.search(name)
    alike = [p for p in params if (number := _NUMBER.search(p)) is None or number[0] == (layer[0] if layer else ".0.")]
    near = difflib.get_close_matches(name, alike, n=2, cutoff=0.6)
    own = sorted(other.rpartition(".")[2] for other in alike if module and other.startswith(f"{module}."))
    nearest = f"; nearest: {', '.join(near)}" if near else ""
    return f"{nearest}; {module} has {', '.join(own)}" if own else nearest


# --- what no tensor fills -------------------------------------------------------------------------------------------


def _share_tied(found: Sources, shared: Sequence[TensorInfo], params: Mapping[str, ParamSpec]) -> None:
    """A tied model's one matrix may be stored under either name, and may serve two parameters (a quantized head)."""
    for name, other in (_TIED, _TIED[::-1]):
        if name not in params or name in found.parts:
            continue
        if other in found.parts:
            _place(found, found.parts[other][0][0], Target(name), params[name])
        elif shared:
            _place(found, shared[0], Target(name), params[name])
    used = {info.name for parts in found.parts.values() for info, _ in parts.values()} if shared else set()
    for info in shared:
        if info.name not in used:
            found.dropped[info.name] = f"tied to {_TIED[0]}, which is there"


def _find_missing(found: Sources, param: ParamSpec, weight_map: WeightMap) -> None:
    parts = found.parts.get(param.name, {})
    if len(parts) == len(param.sections):
        return
    coded = set(_find_missing_codes(found, param, weight_map))
    for index, section in enumerate(param.sections):
        if index in parts or index in coded:
            continue
        source = checkpoint_name(param, index, weight_map)
        if param.name in _TIED and not parts:
            other = _TIED[1 - _TIED.index(param.name)]
            found.missing.append(f"{source} is missing (and {other} does not stand in for it)")
        else:
            part = f" (part {section.name!r} of {param.name})" if len(param.sections) > 1 else ""
            found.missing.append(f"{source} is missing{part}")


def _find_missing_codes(found: Sources, param: ParamSpec, weight_map: WeightMap) -> Iterator[int]:
    """The sections that have a form on disk; what their weights lack there is noted."""
    from streaming.disk_matching import missing_leaves

    section = 0
    for run, (form, count) in enumerate(zip(param.forms, param.runs, strict=True)):
        if form is not None:
            yield from range(section, section + count)
            there = found.coded.get(param.name, {}).get(run, {})
            for leaf in missing_leaves(form, there, (param.run_rows[run], param.shape[1])):
                module = checkpoint_name(param, section, weight_map).rpartition(".")[0]
                found.missing.append(f"{module}.{leaf} is missing (the weight is {form.name})")
        section += count


def checkpoint_name(param: ParamSpec, section: int, weight_map: WeightMap) -> str:
    """What a checkpoint usually calls the tensor that fills this section."""
    module, _, leaf = param.name.rpartition(".")
    parent, _, last = module.rpartition(".")
    if parent.endswith(".experts"):
        return f"{parent}.{_in_expert(last, section, weight_map)}.{leaf}"
    for rule in weight_map.stacked:
        if rule.target == last and rule.first <= section < rule.stop:
            return f"{parent}.{rule.source}.{leaf}"
    return param.name


def _in_expert(projection: str, section: int, weight_map: WeightMap) -> str:
    """The number of the expert that this section of a projection of all experts is in, and what the section is called
    there."""
    rules = [rule for rule in weight_map.experts if rule.target == projection]
    of = rules[0].of if rules else 1
    expert, part = divmod(section, of)
    source = next((rule.source for rule in rules if rule.first <= part < rule.stop), projection)
    return f"{expert}.{source}"


def holds_both_tied(tensors: Mapping[str, TensorInfo], weight_map: WeightMap) -> bool:
    """Whether embedding and head are there each by itself, whatever stands before their names."""
    lookup = NameLookup(weight_map)
    targets = (lookup.locate(name) for name in tensors if name.endswith(_WEIGHT_LEAVES))
    names = [f".{target.param.rpartition('.')[0]}" for target in targets if isinstance(target, Target)]
    ends = [f".{tied.removeprefix('model.').removesuffix('.weight')}" for tied in _TIED]
    return all(any(name.endswith(end) for name in names) for end in ends)

"""Filling a whole shell at once from a function that gives wide tensors: the resident model that streaming must equal.

It shares the weight map and the schemes with the streaming runtime, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from layers.architecture import EMBED_WEIGHT, HEAD_WEIGHT, is_optional_bias, is_tied
from layers.decoder import DecoderModel
from layers.errors import WeightError
from layers.fused_experts import (
    expert_name,
    holds_gate_up,
    is_fused,
    is_fused_weight,
    lie_transposed,
    may_be_fused,
)
from layers.weights import Dropped, LayerSpec, ParamSpec, Target, WeightMap
from quant.disk_forms.form import disk_tensors, fill
from quant.dtypes import to_torch
from quant.scheme import empty_stored

ALIGNMENT = 64


@dataclass(frozen=True)
class Source:
    """The tensor that a section comes from: its name, the section's first row in it, and the rows it must have.

    `transposed`: the tensor's columns are those rows.
    """

    name: str
    first: int
    total_rows: int
    transposed: bool = False


def fill_shell(
    model: DecoderModel,
    specs: Sequence[LayerSpec],
    weight_map: WeightMap,
    *,
    names: Iterable[str],
    get_tensor: Callable[[str], torch.Tensor],
    device: str | torch.device = "cpu",
) -> None:
    """Fill every parameter of `specs`.

    `names` are the checkpoint's tensors, `get_tensor` gives one of them, whole and in any wide dtype. A quantized
    weight is made from that dtype directly, a wide one is rounded to the model's. Raises WeightError with all names
    that are missing or have no home, or for a tensor of the wrong shape.
    """
    names, get_tensor = _by_expert(tuple(names), specs, weight_map, get_tensor)
    coded = coded_sources(names, specs, weight_map)
    of_forms = {name for tensors in coded.values() for name in tensors.values()}
    names = [name for name in names if name not in of_forms]
    sources = find_sources(names, specs, weight_map, get_tensor=get_tensor)
    for param in _by_name(specs).values():
        stored = allocate(param, device=device)
        for run, form in enumerate(param.forms):
            if form is not None:
                tensors = {leaf: get_tensor(name).to(device) for leaf, name in coded[param.name, run].items()}
                fill_run(stored, param, run, tensors)
        for section in range(len(param.sections)):
            if param.form_at(section) is None:
                fill_section(stored, param, section, _rows(param, section, sources[param.name, section], get_tensor))
        module = param.name.rpartition(".")[0]
        for stored_name, tensor in stored.items():
            model.assign(f"{module}.{stored_name}", tensor)


def find_sources(
    names: Iterable[str],
    specs: Sequence[LayerSpec],
    weight_map: WeightMap,
    *,
    get_tensor: Callable[[str], torch.Tensor],
) -> dict[tuple[str, int], Source]:
    """(parameter, section) -> where it comes from. A bias without a home is let pass when it holds only zeros."""
    params = _by_name(specs)
    sources: dict[tuple[str, int], Source] = {}
    problems: list[str] = []
    for name, target in _targets(names, specs, weight_map).items():
        if target.param in params:
            problems.extend(_place(sources, name, target, params[target.param]))
        elif target.param == HEAD_WEIGHT and is_tied(specs):
            problems.append(
                f"{name} is there beside {EMBED_WEIGHT}: the head is not tied (ask for specs with tied=False)"
            )
        elif not (is_optional_bias(target.param, specs=specs) and not get_tensor(name).any()):
            problems.append(f"{name}: the model has no parameter {target.param}")
    if is_tied(specs) and HEAD_WEIGHT in params:
        _share(sources)
    problems.extend(_missing(sources, params))
    if problems:
        raise WeightError("the checkpoint's tensors do not fit the model: " + "; ".join(problems))
    return sources


def allocate(param: ParamSpec, *, device: str | torch.device) -> dict[str, torch.Tensor]:
    """Uninitialized memory for what is stored of `param`, each tensor at an address that is a multiple of 64."""
    stored = {}
    for name, spec in param.storage().items():
        tensor = torch.empty(spec.shape, dtype=to_torch(spec.dtype), device=device)
        assert tensor.data_ptr() % ALIGNMENT == 0, "torch's allocators align by at least 64 bytes"
        stored[name] = tensor
    return stored


def fill_section(stored: Mapping[str, torch.Tensor], param: ParamSpec, section: int, rows: torch.Tensor) -> None:
    """Write one section's wide rows into the stored tensors."""
    if param.kind.has_scheme:
        views = param.scheme.section_views(stored, param.kept_rows, section)
        param.scheme.quantize_into(rows.to(next(iter(views.values())).device), views)
        return
    first = param.section_starts[section]
    (tensor,) = stored.values()
    tensor[first : first + rows.shape[0]].copy_(rows)


def _by_expert(
    names: Sequence[str], specs: Sequence[LayerSpec], weight_map: WeightMap, get_tensor: Callable[[str], torch.Tensor]
) -> tuple[Sequence[str], Callable[[str], torch.Tensor]]:
    """The names, with those of each expert in place of those of all of them, and what gives a tensor by such a name."""
    if not weight_map.experts:
        return names, get_tensor
    interleaved = weight_map.fused_interleaved
    whole_of = lru_cache(maxsize=2)(get_tensor)  # codes and scales of one projection, asked for expert by expert
    shapes = {name: tuple(get_tensor(name).shape) for name in names if may_be_fused(name)}
    shapes = {name: shape for name, shape in shapes.items() if is_fused(name, len(shape))}
    turned = lie_transposed(shapes, specs, usually=weight_map.fused_transposed)
    if turned is None:  # no layer is sparse
        return names, get_tensor
    made = {expert_name(name, e): (name, e) for name, shape in shapes.items() for e in range(shape[0])}
    found = [name for name in names if name not in shapes]

    def get(name: str) -> torch.Tensor:
        if name not in made:
            return get_tensor(name)
        fused, expert = made[name]
        part = whole_of(fused)[expert]
        if turned and is_fused_weight(fused):
            part = part.T.contiguous()
        if interleaved and holds_gate_up(fused):
            part = torch.cat((part[0::2], part[1::2]))
        return part

    return [*found, *made], get


def coded_sources(
    names: Iterable[str], specs: Sequence[LayerSpec], weight_map: WeightMap
) -> dict[tuple[str, int], dict[str, str]]:
    """(parameter, run) -> leaf -> the tensor's name, for weights that are quantized in the checkpoint. What a form
    needs and lacks is not looked for: who made the specs has seen to it."""
    params = {name.rpartition(".")[0]: param for name, param in _by_name(specs).items() if param.forms}
    found: dict[tuple[str, int], dict[str, str]] = {}
    for name in names if params else ():
        target = weight_map.locate(name)
        param = None if isinstance(target, Dropped) else params.get(target.param.rpartition(".")[0])
        if param is None or isinstance(target, Dropped):
            continue
        run, leaf = param.run_at(target.first), name.rpartition(".")[2]
        form = param.forms[run]
        if form is None:
            continue
        if any(one.leaf == leaf for one in disk_tensors(form, param.run_rows[run], param.shape[1])):
            found.setdefault((param.name, run), {})[leaf] = name
    return found


def fill_run(
    stored: Mapping[str, torch.Tensor], param: ParamSpec, run: int, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Fill the sections of one run from its tensors in their form on disk, by leaf."""
    form, rows = param.forms[run], param.run_rows[run]
    assert form is not None
    shape = (rows, param.shape[1])
    if param.kept_as_stored:
        fill(form, tensors, param.scheme.section_views(stored, param.run_rows, run), shape=shape)
        return
    device = next(iter(stored.values())).device
    held = empty_stored(form.kept.storage((rows,), shape[1], wide=param.dtype), device=device)
    fill(form, tensors, form.kept.section_views(held, (rows,), 0), shape=shape)
    wide = form.kept.dequantize(held, (rows,), dtype=to_torch(param.dtype), in_features=param.shape[1])
    first = param.run_starts[run]
    parts = wide.split(list(param.section_rows[first : first + param.runs[run]]))
    for section, part in enumerate(parts, start=first):
        fill_section(stored, param, section, part)


def _by_name(specs: Iterable[LayerSpec]) -> dict[str, ParamSpec]:
    return {param.name: param for spec in specs for param in spec.params}


def _targets(names: Iterable[str], specs: Sequence[LayerSpec], weight_map: WeightMap) -> dict[str, Target]:
    """Where each tensor goes, without those that are dropped. A tied model's one matrix may be called the head."""
    located = {name: weight_map.locate(name) for name in names}
    targets = {name: target for name, target in located.items() if not isinstance(target, Dropped)}
    if is_tied(specs) and not any(target.param == EMBED_WEIGHT for target in targets.values()):
        targets = {n: Target(EMBED_WEIGHT) if t.param == HEAD_WEIGHT else t for n, t in targets.items()}
    return targets


def _place(sources: dict[tuple[str, int], Source], name: str, target: Target, param: ParamSpec) -> Iterable[str]:
    covered = param.section_rows[target.first : target.stop]
    first = 0
    for section, rows in enumerate(covered, start=target.first):
        taken = sources.setdefault((param.name, section), Source(name, first, sum(covered), target.transposed))
        if taken.name != name:
            yield f"{name} and {taken.name} both fill {param.name}"
        first += rows


def _share(sources: dict[tuple[str, int], Source]) -> None:
    """A tied model's head that is stored by itself (quantized) comes from the table's tensor."""
    if (EMBED_WEIGHT, 0) in sources:
        sources.setdefault((HEAD_WEIGHT, 0), sources[EMBED_WEIGHT, 0])


def _missing(sources: Mapping[tuple[str, int], Source], params: Mapping[str, ParamSpec]) -> Iterable[str]:
    for param in params.values():
        for section, part in enumerate(param.sections):
            if (param.name, section) not in sources and param.form_at(section) is None:
                yield f"nothing fills {param.name}" + (f" (part {part.name})" if part.name else "")


def _rows(param: ParamSpec, section: int, source: Source, get_tensor: Callable[[str], torch.Tensor]) -> torch.Tensor:
    tensor = get_tensor(source.name)
    if source.transposed and tensor.dim() == 2:
        tensor = tensor.T.contiguous()
    wanted = (source.total_rows, *param.shape[1:])
    if tuple(tensor.shape) != wanted or not tensor.is_floating_point():
        raise WeightError(
            f"{source.name} is {list(tensor.shape)} {tensor.dtype}, but the configuration makes it {list(wanted)} of a "
            f"float dtype (it fills {param.name})"
        )
    return tensor[source.first : source.first + param.section_rows[section]]

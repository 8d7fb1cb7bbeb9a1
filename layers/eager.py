"""Filling a whole shell at once from a function that gives wide tensors: the resident model that streaming must equal.

It shares the weight map and the schemes with the streaming runtime, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from layers.architecture import EMBED_WEIGHT, HEAD_WEIGHT, is_optional_bias, is_tied
from layers.decoder import DecoderModel
from layers.errors import WeightError
from layers.weights import Dropped, LayerSpec, ParamKind, ParamSpec, Target, WeightMap
from quant.dtypes import to_torch

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
    sources = find_sources(names, specs, weight_map, get_tensor=get_tensor)
    for param in _by_name(specs).values():
        stored = allocate(param, device=device)
        for section in range(len(param.sections)):
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
    if param.kind in (ParamKind.LINEAR, ParamKind.HEAD):
        views = param.scheme.section_views(stored, param.section_rows, section)
        param.scheme.quantize_into(rows.to(next(iter(views.values())).device), views)
        return
    first = sum(param.section_rows[:section])
    (tensor,) = stored.values()
    tensor[first : first + rows.shape[0]].copy_(rows)


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
            if (param.name, section) not in sources:
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

"""Names to homes: which checkpoint tensor fills which section of which parameter, and every fault found. [no-torch]

Every tensor is given a home (a parameter's section, or a reason to be dropped), and every section is asked whether it
has a source. Nothing is read but the few small tensors that may be all zero.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from layers.weights import Dropped, LayerSpec, ParamSpec, Target, WeightMap
from streaming.checkpoint.tensors import TensorInfo


@dataclass
class Sources:
    """Which tensor fills which section: parts[parameter][section] = (tensor, first row of the section in it)."""

    parts: dict[str, dict[int, tuple[TensorInfo, int]]] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)

    @property
    def problems(self) -> tuple[str, ...]:
        """Every fault found, one line each."""
        return (*self.missing, *self.mismatched)


def match_names(
    tensors: Mapping[str, TensorInfo],
    specs: Sequence[LayerSpec],
    weight_map: WeightMap,
    *,
    tied: bool,
    unwrap: bool,
    is_zero: Callable[[TensorInfo], bool],
) -> Sources:
    """Give every tensor its home.

    Names that a trainer's wrapper changed are recognised when all names match without it: then they are read so
    (`unwrap`), or the report says what would make them match.
    """
    plain = _match(tensors, specs, weight_map, tied=tied, is_zero=is_zero)
    if not plain.problems:
        return plain
    for what, unwrapped in _unwrappings(tensors):
        found = _match(unwrapped, specs, weight_map, tied=tied, is_zero=is_zero)
        if not found.problems and unwrap:
            found.notes.append(f"{what} in every tensor name: read as if it were not so")
            return found
        if not found.problems:
            hint = f"{what} in every tensor name; --unwrap-names reads them as if it were not so"
            return Sources(mismatched=[hint])
    return plain


def _unwrappings(tensors: Mapping[str, TensorInfo]) -> Iterable[tuple[str, dict[str, TensorInfo]]]:
    for prefix in ("_orig_mod.", "module.", "module._orig_mod.", "model.", "language_model.", "model.language_model."):
        if all(name.startswith(prefix) for name in tensors):
            yield f"{prefix!r} stands", {name.removeprefix(prefix): info for name, info in tensors.items()}
    heads = ("lm_head.", "model.")
    if not any(name.startswith("model.") for name in tensors):
        added = {name if name.startswith(heads) else f"model.{name}": info for name, info in tensors.items()}
        yield "'model.' is missing", added
    if any("_orig_mod." in name for name in tensors):
        yield "'_orig_mod.' stands", {name.replace("_orig_mod.", ""): info for name, info in tensors.items()}


def _match(
    tensors: Mapping[str, TensorInfo],
    specs: Sequence[LayerSpec],
    weight_map: WeightMap,
    *,
    tied: bool,
    is_zero: Callable[[TensorInfo], bool],
) -> Sources:
    params = {param.name: param for spec in specs for param in spec.params}
    found = Sources()
    for name, info in tensors.items():
        target = weight_map.locate(name)
        if isinstance(target, Dropped):
            found.dropped[name] = target.reason
        elif target.param in params:
            _place(found, name, info, target, params[target.param])
        elif not (tied and target.param in _TIED):
            _place_homeless(found, name, info, target, params, is_zero)
    if tied:
        _share_tied(found, tensors, params)
    for param in params.values():
        _find_missing(found, param, weight_map)
    return found


_TIED = ("model.embed_tokens.weight", "lm_head.weight")


def _place(found: Sources, name: str, info: TensorInfo, target: Target, param: ParamSpec) -> None:
    rows = param.section_rows
    if not 0 <= target.first < target.stop <= len(rows):
        found.mismatched.append(f"{name}: parts {target.first} to {target.stop} of {param.name}, which has {len(rows)}")
        return
    wanted = (sum(rows[target.first : target.stop]), *param.shape[1:])
    if info.shape != wanted:
        found.mismatched.append(
            f"{name} in {info.file.name}: shape {list(info.shape)}, but the config makes it {list(wanted)}"
        )
    if not info.dtype.is_wide:
        found.mismatched.append(f"{name} in {info.file.name}: dtype {info.dtype.value}, but a float weight is needed")
    first_row = 0
    for section in range(target.first, target.stop):
        if section in found.parts.setdefault(param.name, {}):
            other = found.parts[param.name][section][0].name
            found.mismatched.append(f"{name} and {other} both fill {param.name}")
        found.parts[param.name][section] = (info, first_row)
        first_row += rows[section]


def _place_homeless(
    found: Sources,
    name: str,
    info: TensorInfo,
    target: Target,
    params: Mapping[str, ParamSpec],
    is_zero: Callable[[TensorInfo], bool],
) -> None:
    module, _, leaf = target.param.rpartition(".")
    if leaf == "bias" and f"{module}.weight" in params and len(info.shape) == 1:
        if is_zero(info):
            found.dropped[name] = "a bias of zeros for a layer without one"
        else:
            found.mismatched.append(f"{name}: a bias that is not zero, but the config gives {module} none")
        return
    near = difflib.get_close_matches(target.param, params, n=2, cutoff=0.6)
    siblings = sorted(other for other in params if other.startswith(f"{module}."))
    hint = f"; nearest: {', '.join(near)}" if near else ""
    own = f"; {module} has {', '.join(s.rpartition('.')[2] for s in siblings)}" if siblings else ""
    found.mismatched.append(f"{name} in {info.file.name}: no parameter of the model is called so{hint}{own}")


def _share_tied(found: Sources, tensors: Mapping[str, TensorInfo], params: Mapping[str, ParamSpec]) -> None:
    """A tied model's one matrix may be stored under either name, and may serve two parameters (a quantized head)."""
    for name, other in (_TIED, _TIED[::-1]):
        if name in params and name not in found.parts and other in tensors:
            _place(found, other, tensors[other], Target(name), params[name])


def _find_missing(found: Sources, param: ParamSpec, weight_map: WeightMap) -> None:
    parts = found.parts.get(param.name, {})
    for index, section in enumerate(param.sections):
        if index in parts:
            continue
        source = checkpoint_name(param, index, weight_map)
        if param.name in _TIED and not parts:
            other = _TIED[1 - _TIED.index(param.name)]
            found.missing.append(f"{source} is missing (and {other} does not stand in for it)")
        else:
            part = f" (part {section.name!r} of {param.name})" if len(param.sections) > 1 else ""
            found.missing.append(f"{source} is missing{part}")


def checkpoint_name(param: ParamSpec, section: int, weight_map: WeightMap) -> str:
    """What a checkpoint usually calls the tensor that fills this section."""
    module, _, leaf = param.name.rpartition(".")
    parent, _, last = module.rpartition(".")
    for rule in weight_map.stacked:
        if rule.target == last and rule.first <= section < rule.stop:
            return f"{parent}.{rule.source}.{leaf}"
    return param.name

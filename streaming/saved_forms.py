"""How each quantized weight of a folder of shards is kept: its scheme, and which of its sections lie as one. [no-torch]

In a manifest: {"model.layers.0.mlp.gate_up_proj.weight": {"scheme": {"class": ...}, "runs": [2]}, ...}; weights that
are not named are wide. `runs` is [] where the scheme treats every section by itself, as it does what is quantized while
loading; what was joined in the checkpoint itself is kept joined, and `runs` counts the sections of each part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from layers.weights import LayerSpec, ParamKind, ParamSpec
from quant.errors import QuantError
from quant.scheme import Scheme
from quant.scheme_data import MOST, scheme_from_data, scheme_to_data
from quant.wide import Wide
from streaming.errors import CheckpointFormatError


@dataclass(frozen=True)
class SavedForm:
    """The scheme of a weight, and how many sections each of its parts joins; () where each section is a part."""

    scheme: Scheme
    runs: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"scheme": scheme_to_data(self.scheme), "runs": list(self.runs)}


SavedForms = Mapping[str, SavedForm]
"""By the parameter's name."""


def forms_of(specs: Iterable[LayerSpec]) -> dict[str, SavedForm]:
    """What to write of a model, of any rank's parts of whose weights these are. QuantError for a scheme that cannot be
    read back."""
    wholes = (param.whole for spec in specs for param in spec.params if param.is_quantized)
    return {whole.name: SavedForm(whole.scheme, _runs(whole)) for whole in wholes}


def _runs(param: ParamSpec) -> tuple[int, ...]:
    return () if param.kept_rows == param.section_rows else param.runs


def parse_forms(raw: object) -> dict[str, SavedForm]:
    """What a manifest says. QuantError names the weight and what is wrong there."""
    if not isinstance(raw, Mapping):
        raise QuantError(f"weights is {str(raw)[:60]!r}, not an object")
    return {name: _form(name, entry) for name, entry in raw.items()}


def _form(name: str, entry: object) -> SavedForm:
    if not isinstance(entry, Mapping) or set(entry) != {"scheme", "runs"}:
        raise QuantError(f'{name[:200]} is {str(entry)[:60]!r}, not {{"scheme": ..., "runs": ...}}')
    runs = entry["runs"]
    if not isinstance(runs, Sequence) or not all(type(count) is int and 0 < count <= MOST for count in runs):
        raise QuantError(f"{name[:200]}: runs is {str(runs)[:60]!r}, not a list of whole numbers above 0")
    try:
        return SavedForm(scheme_from_data(entry["scheme"]), tuple(runs))
    except QuantError as error:
        raise QuantError(f"{name[:200]}: {error}") from None


@dataclass(frozen=True)
class SavedPolicy:
    """The scheme of each parameter, as it was saved."""

    forms: SavedForms

    def scheme_for(self, kind: str, name: str) -> Scheme:
        """The scheme of a parameter."""
        form = self.forms.get(name) if ParamKind(kind).has_scheme else None
        return Wide() if form is None else form.scheme


def as_saved(specs: Sequence[LayerSpec], forms: SavedForms, *, where: str) -> tuple[LayerSpec, ...]:
    """The specs that SavedPolicy gave, with what was joined. Raises CheckpointFormatError, after `where`, for names
    that are no weights of the model and for runs that are not its sections."""
    params = {p.name: p for spec in specs for p in spec.params if p.kind.has_scheme}
    problems = [f"weights has {name[:200]!r}, which the model has not" for name in forms if name not in params]
    for name, form in forms.items():
        sections = len(params[name].sections) if name in params else 0
        if form.runs and sections and sum(form.runs) != sections:
            problems.append(f"{name}: runs is {str(list(form.runs))[:60]} of {sections} sections")
    problems += [fault for name, form in forms.items() if name in params and (fault := _misfit(params[name], form))]
    if problems:
        more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
        raise CheckpointFormatError(f"{where}: {problems[0]}{more}")

    def joined(param: ParamSpec) -> ParamSpec:
        runs = forms[param.name].runs if param.name in forms else ()
        return replace(param, runs=runs) if runs else param

    return tuple(replace(spec, params=tuple(map(joined, spec.params))) for spec in specs)


def _misfit(param: ParamSpec, form: SavedForm) -> str | None:
    try:
        form.scheme.storage(param.section_rows, param.shape[1], wide=param.dtype)
    except QuantError as error:
        return f"{param.name}: {error}"
    return None

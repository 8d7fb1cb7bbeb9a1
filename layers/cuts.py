"""What one of several ranks has of a model's parameters: its layers, its rows and columns, its experts. [no-torch]

Every parameter says how it is cut (`Sharding`); here that becomes numbers. What comes out are parameters of ordinary
shapes and sections, each with the part of the uncut one that it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import cast

from layers.architecture import EMBED_WEIGHT, is_tied
from layers.errors import ShardError
from layers.model_config import ModelConfig
from layers.rank_config import check_heads
from layers.topology import Topology, experts_of
from layers.weights import LayerSpec, ParamCut, ParamSpec, Part, Section, Split
from quant.cuts import cut_scheme
from quant.disk_forms.form import DiskForm
from quant.errors import QuantError
from quant.scheme import Scheme
from quant.shared_scales import Scope, SectionCut, scope_of

VOCABULARY_MULTIPLE = 64  # each rank has whole runs of so many rows of the vocabulary, but for the last


def cut_specs(specs: Sequence[LayerSpec], config: ModelConfig, topology: Topology) -> tuple[LayerSpec, ...]:
    """The layers of this rank, with its part of each parameter; those that it has nothing of are left out.

    Raises ShardError, with both numbers, for what cannot be cut so.
    """
    if topology.is_single:
        return tuple(specs)
    check_heads(config, topology)
    if topology.expert > 1 and config.moe is None:
        raise ShardError(f"expert parallel size {topology.expert}: the model has no experts that ranks could share")
    found = []
    for spec in stage_layers(specs, config, topology):
        params = (cut_param(param, topology) for param in spec.params)
        found.append(replace(spec, params=tuple(param for param in params if param is not None)))
    return tuple(found)


def vocabulary_rows(vocab_size: int, ranks: int) -> int:
    """Rows of the vocabulary for each rank, padding included; the last ranks may have fewer that exist, or none."""
    multiple = VOCABULARY_MULTIPLE
    return -(-vocab_size // (multiple * ranks)) * multiple


def stage_layers(specs: Sequence[LayerSpec], config: ModelConfig, topology: Topology) -> Iterator[LayerSpec]:
    """The uncut layers of this rank's stage of the pipeline; the first stage has the embedding table, the last one the
    head, and where the two are one matrix each of them has it."""
    if topology.pipeline == 1:
        yield from specs
        return
    first, stop = topology.layers_of_stage(config.num_layers)
    tables = [param for spec in specs for param in spec.params if param.name == EMBED_WEIGHT]
    for spec in specs:
        if spec.name == "embed":
            if topology.stage == 0:
                yield replace(spec, params=tuple(tables)) if is_tied(specs) else spec
        elif spec.name == "head":
            if topology.stage == topology.pipeline - 1:
                yield spec
        elif first <= int(spec.name.removeprefix("layers.")) < stop:
            yield spec


def cut_param(param: ParamSpec, topology: Topology) -> ParamSpec | None:
    """A rank's part of a parameter of its stage; None where it has nothing of it. Raises ShardError."""
    sharding = param.sharding
    if sharding.experts and topology.expert > 1:
        return _own_experts(param, topology)
    if topology.tensor == 1:
        return param
    match sharding.split:
        case Split.WHOLE:
            return param
        case Split.ONCE:
            return param if topology.tensor_rank == 0 else None
        case Split.COLUMNS:
            units = sharding.units[0] if sharding.units else None
            return _columns_of(param, _shares(param, param.shape[1], units, topology, "inputs"), topology)
        case Split.VOCABULARY:
            step, rows = vocabulary_rows(param.shape[0], topology.tensor), param.shape[0]
            starts = [min(rows, rank * step) for rank in range(topology.tensor + 1)]
            return _rows_of(param, [tuple(pairwise(starts))], topology)
        case Split.ROWS:
            if len(sharding.units) == 1 and len(param.sections) > 1:
                return _sections_of(param, _shares_of_heads(param, sharding.units[0], topology), topology)
            return _rows_of(param, list(_shares_of_sections(param, topology)), topology)


Spans = tuple[tuple[int, int], ...]  # [first, stop) of each tensor rank


def _shares_of_sections(param: ParamSpec, topology: Topology) -> Iterator[Spans]:
    units = param.sharding.units
    for index, section in enumerate(param.sections):
        count = units[index] if units else None
        yield _shares(param, section.rows, count, topology, "outputs")


def _shares(param: ParamSpec, size: int, units: int | None, topology: Topology, what: str) -> Spans:
    """The parts of `size` rows or columns, which are so many heads, or (None) may be cut anywhere."""
    if units is not None:
        each = size // units
        return tuple((first * each, stop * each) for first, stop in _shares_of_heads(param, units, topology))
    part, over = divmod(size, topology.tensor)
    if over:
        raise ShardError(f"{param.name}: its {size} {what} are not divided by tensor parallel size {topology.tensor}")
    return tuple((rank * part, (rank + 1) * part) for rank in range(topology.tensor))


def _shares_of_heads(param: ParamSpec, heads: int, topology: Topology) -> Spans:
    ranks = topology.tensor
    if heads >= ranks and heads % ranks == 0:
        each = heads // ranks
        return tuple((rank * each, (rank + 1) * each) for rank in range(ranks))
    if heads < ranks and ranks % heads == 0:  # several ranks have the same head
        owners = [rank // (ranks // heads) for rank in range(ranks)]
        return tuple((head, head + 1) for head in owners)
    raise ShardError(f"{param.name}: {heads} heads and tensor parallel size {ranks}: neither divides the other")


def _rows_of(param: ParamSpec, shares: Sequence[Spans], topology: Topology) -> ParamSpec:
    """This rank's rows of every section."""
    parts = tuple(Part(index, *spans[topology.tensor_rank]) for index, spans in enumerate(shares))
    return _part_of(param, ParamCut(param, parts, row_edges=tuple(_edges(spans) for spans in shares)))


def _columns_of(param: ParamSpec, spans: Spans, topology: Topology) -> ParamSpec:
    cut = ParamCut(param, param.parts, spans[topology.tensor_rank], column_edges=_edges(spans))
    return _part_of(param, cut)


def _sections_of(param: ParamSpec, spans: Spans, topology: Topology) -> ParamSpec:
    """Whole sections, which are a head each."""
    parts = param.parts[slice(*spans[topology.tensor_rank])]
    return _part_of(param, ParamCut(param, parts))


def _edges(spans: Spans) -> tuple[int, ...]:
    return tuple(sorted({edge for span in spans for edge in span}))


def _part_of(param: ParamSpec, cut: ParamCut) -> ParamSpec:
    """The parameter that has these parts of sections, and of those these columns."""
    sections = tuple(Section(param.sections[part.section].name, part.stop - part.start) for part in cut.parts)
    inner = param.shape[1:] if cut.columns is None else (cut.columns[1] - cut.columns[0],)
    shape = (sum(section.rows for section in sections), *inner)
    scheme = param.scheme
    if param.kind.has_scheme:
        try:
            scheme = cut_scheme(
                scheme, row_offsets=_offsets(param, cut.parts), columns=cut.columns, in_features=param.shape[1]
            )
        except QuantError as error:
            raise ShardError(f"{param.name}: {error}") from error
    return replace(param, shape=shape, sections=sections, scheme=scheme, forms=(), runs=(), cut=cut)


def _offsets(param: ParamSpec, parts: Sequence[Part]) -> list[int]:
    """Where each part begins, from where its blocks and groups are counted: the section's first row, or that of the run
    that is kept as one."""
    if param.kept_rows == param.section_rows:
        return [part.start for part in parts]
    return [param.offset_in_run(part.section) + part.start for part in parts]


def scale_scope(param: ParamSpec, section: int) -> Scope:
    """What of a section's other parts this rank's part must know to be quantized as the whole would be."""
    if not (param.is_quantized and param.is_cut_within) or param.cut is None:
        return Scope.OWN
    return _scope_of(cast("Hashable", param.whole.scheme), param.cut.section_cut(section))


@lru_cache(maxsize=1024)
def _scope_of(scheme: Hashable, cut: SectionCut) -> Scope:
    return scope_of(cast("Scheme", scheme), cut)


def _own_experts(param: ParamSpec, topology: Topology) -> ParamSpec:
    """Whole experts: runs of sections, in the order in which the rank keeps them, with their forms on disk."""
    count, experts = param.sharding.experts, experts_of(topology, param.sharding.experts)
    each = len(param.sections) // count
    indices = [expert * each + index for expert in experts for index in range(each)]
    parts = tuple(Part(index, 0, param.sections[index].rows) for index in indices)
    sections = tuple(param.sections[index] for index in indices)
    forms, runs = _own_runs(param, experts, each) if param.runs else ((), ())
    shape = (sum(section.rows for section in sections), *param.shape[1:])
    return replace(param, shape=shape, sections=sections, forms=forms, runs=runs, cut=ParamCut(param, parts))


def _own_runs(
    param: ParamSpec, experts: Sequence[int], each: int
) -> tuple[tuple[DiskForm | None, ...], tuple[int, ...]]:
    """The forms and runs of these experts. Raises ShardError where a tensor on disk joins several experts."""
    forms: list[DiskForm | None] = []
    runs: list[int] = []
    for expert in experts:
        at = param.run_at(expert * each)
        covered = 0
        while covered < each:
            if param.run_starts[at] != expert * each + covered or covered + param.runs[at] > each:
                raise ShardError(f"{param.name}: expert {expert} is stored together with others, as one")
            forms.append(param.forms[at] if param.forms else None)
            runs.append(param.runs[at])
            covered += param.runs[at]
            at += 1
    return tuple(forms) if param.forms else (), tuple(runs)

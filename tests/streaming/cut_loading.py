"""Loads of one model on the ranks of a mesh, as threads of one process, and what they must keep: parts of the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import anyio
import torch

from layers.parallel import Group, Groups, SingleGroup
from layers.topology import Topology
from layers.weights import ParamSpec
from quant.cuts import cut_stored
from streaming.device import open_device
from streaming.options import LoadOptions
from streaming.pipeline import Pipeline
from streaming.prepare import Prepared, prepare
from streaming.reader_choice import start_reader
from streaming.residency import Residency
from streaming.trace import Tracer
from tests.layers.thread_groups import ThreadGroup, on_ranks, thread_groups

Stored = dict[str, dict[str, torch.Tensor]]
Maximum = Callable[[torch.Tensor], torch.Tensor]


def load_stored(prepared: Prepared, *, maximum: Maximum = lambda x: x, reads: Group | None = None) -> Stored:
    """Every stored tensor of a rank, in the way that its options ask for; as many bytes are read as its plan says."""
    tracer = Tracer()
    with (
        closing(start_reader(prepared)) as reader,
        closing(open_device("cpu", prepared.plan, reader)) as device,
    ):
        residency = Residency([spec.name for spec in prepared.specs if spec.params], tracer)
        group = reads or SingleGroup()
        pipeline = Pipeline(prepared.plan, reader, device, residency, tracer, maximum=maximum, reads=group)
        anyio.run(pipeline.run)
        read = sum(int(span.args["nbytes"]) for span in tracer.spans() if span.lane == "read")
        assert read == prepared.plan.read_nbytes
        return {param: {name: t.clone() for name, t in tensors.items()} for param, tensors in device.stored.items()}


def load_on_ranks(model: str, options: LoadOptions) -> tuple[list[Prepared], list[Stored]]:
    """The plans and what is kept, of every rank; one stage of the pipeline after the other."""
    topology = options.topology()
    plans = [prepare(model, options, rank=rank) for rank in range(topology.world)]
    found: list[Stored] = []
    for first in range(0, topology.world, topology.stage_ranks):
        sharing = thread_groups(topology)  # apart from the maxima's, as in a run

        def load(at: Topology, groups: Groups, first: int = first, sharing: Sequence[Groups] = sharing) -> Stored:
            reads = sharing[at.rank].tensor
            try:
                return load_stored(plans[first + at.rank], maximum=groups.tensor.maximum, reads=reads)
            except Exception:
                if isinstance(reads, ThreadGroup):
                    reads.meeting.end()
                raise

        found += on_ranks(topology, load)
    return plans, found


def part_of(param: ParamSpec, whole: ParamSpec, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a rank is to keep of what is kept of the uncut parameter, section by section joined."""
    if param.cut is None:
        return dict(stored)
    if not whole.kind.has_scheme:
        begins = whole.section_starts
        ((name, tensor),) = stored.items()
        joined = torch.cat(
            [tensor[begins[part.section] + part.start : begins[part.section] + part.stop] for part in param.parts]
        )
        return {name: joined if param.cut.columns is None else joined[:, slice(*param.cut.columns)]}
    parts: dict[str, list[torch.Tensor]] = {}
    starts = [0]
    for rows in whole.kept_rows:
        starts.append(starts[-1] + rows)
    for part in param.parts:
        first = whole.section_starts[part.section]
        kept = next(at for at in range(len(whole.kept_rows)) if starts[at] <= first < starts[at + 1])
        offset = first - starts[kept]
        found = cut_stored(
            whole.scheme, whole.scheme.section_views(stored, whole.kept_rows, kept), param.scheme,
            rows=(offset + part.start, offset + part.stop), columns=param.cut.columns,
            total_rows=whole.kept_rows[kept], in_features=whole.shape[1],
        )  # fmt: skip
        for name, tensor in found.items():
            parts.setdefault(name, []).append(tensor)
    made = {}
    for name, tensors in parts.items():
        joined = torch.cat([tensor.view(torch.uint8) for tensor in tensors])
        made[name] = joined.view(tensors[0].dtype)
    return made


def check_parts(model: str, options: LoadOptions, alone: LoadOptions) -> list[Prepared]:
    """Load with one rank and with many; every rank keeps its part of what the one keeps, to the bit, and all of it is
    on some rank."""
    single = prepare(model, alone)
    whole = load_stored(single)
    params = {param.name: param for spec in single.specs for param in spec.params}
    plans, ranks = load_on_ranks(model, options)
    for at, (prepared, stored) in enumerate(zip(plans, ranks, strict=True)):
        for param in (param for spec in prepared.specs for param in spec.params):
            wanted = part_of(param, params[param.name], whole[param.name])
            assert stored[param.name].keys() == wanted.keys(), param.name
            if not param.shape[0]:
                continue  # a rank beyond the last row of the vocabulary: a scale of no numbers says nothing
            for name, tensor in stored[param.name].items():
                same = tensor.contiguous().view(torch.uint8).equal(wanted[name].contiguous().view(torch.uint8))
                assert same, f"rank {at}: {param.name} {name} {param.scheme} of {params[param.name].scheme}"
    assert uncovered(params, plans) == []
    return plans


def uncovered(params: Mapping[str, ParamSpec], plans: Sequence[Prepared]) -> list[str]:
    """The parameters of which some number is on no rank. Counted by rows and by columns, since each part is one of a
    grid of rows and columns."""
    owned = [param for plan in plans for spec in plan.specs for param in spec.params]
    found = []
    for name, whole in params.items():
        rows = torch.zeros(whole.shape[0], dtype=torch.bool)
        columns = torch.zeros(whole.shape[-1], dtype=torch.bool)
        for param in (param for param in owned if param.name == name):
            for part in param.parts:
                first = whole.section_starts[part.section]
                rows[first + part.start : first + part.stop] = True
            columns[slice(*(param.cut.column_range if param.cut and param.cut.columns else (0, whole.shape[-1])))] = (
                True
            )
        if not (rows.all() and columns.all()):
            found.append(name)
    return found

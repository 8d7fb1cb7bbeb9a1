"""One layer loaded by itself, through the same stages as ever: to reproduce a fault without the rest of the model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace

import anyio
import torch

from layers.parallel import SingleGroup
from streaming.checkpoint.remote_file import RemoteFile, WeightFile
from streaming.cut_storing import Maximum
from streaming.device import open_device
from streaming.errors import OptionError
from streaming.hooks import Hooks
from streaming.pipeline import Pipeline
from streaming.plan import LayerPlan, LoadPlan
from streaming.prepare import Prepared
from streaming.read_plan import plan_reads
from streaming.reader_choice import start_reader
from streaming.residency import Residency
from streaming.runner import choose_threads
from streaming.trace import Tracer
from streaming.weight_checks import WeightChecks

_NO_HOOKS = Hooks()


def only_layer(prepared: Prepared, layer: int | str) -> Prepared:
    """The same load with one layer in its plan (an int counts decoder layers). Raises OptionError naming those there
    are."""
    wanted = f"layers.{layer}" if isinstance(layer, int) else layer
    found = next((one for one in prepared.plan.layers if one.name == wanted and one.items), None)
    if found is None:
        known = ", ".join(one.name for one in prepared.plan.layers if one.items)
        raise OptionError(f"layer {layer!r} is not one of {known}")
    items = tuple(replace(item, index=index) for index, item in enumerate(found.items))
    only = LayerPlan(found.name, found.spec, items)
    plan = LoadPlan((only,), prepared.plan.table, {}, topology=prepared.topology)
    window = prepared.options.window_nbytes or prepared.budget.window_nbytes
    read_plan = plan_reads(plan, window_nbytes=window)
    states = dict(zip(prepared.read_plan.files, prepared.read_plan.states, strict=False))  # none for remote files
    read_plan = replace(
        read_plan,
        files=tuple(map(_without_copy, read_plan.files)),
        states=tuple(states[file] for file in read_plan.files) if states else (),
    )
    return replace(prepared, plan=plan, read_plan=read_plan, retie=False)


def _without_copy(file: WeightFile) -> WeightFile:
    """A copy would be made whole at the end: all bytes of the file for the sake of some."""
    return replace(file, copy_to=None) if isinstance(file, RemoteFile) else file


def load_one_layer(
    prepared: Prepared, layer: int | str, *, hooks: Hooks = _NO_HOOKS, maximum: Maximum | None = None
) -> dict[str, torch.Tensor]:
    """The layer's stored tensors under their full names, on the device of the options; nothing stays open.

    `maximum`: over the ranks that share it, where this is one of several. No byte of another layer is read. Raises
    LayerLoadError (layer, stage, tensor) when it cannot be loaded.
    """
    one = only_layer(prepared, layer)
    with closing(start_reader(one)) as reader, closing(open_device(one.options.device, one.plan, reader)) as device:
        residency, threads = Residency([one.plan.layers[0].name], Tracer()), choose_threads(one.options.threads)
        pipeline = Pipeline(
            one.plan, reader, device, residency, Tracer(),
            threads=threads.resident, check_weights=one.options.check_weights, hooks=hooks,
            checks=WeightChecks(norm=one.config.norm), maximum=maximum or SingleGroup().maximum,
        )  # fmt: skip
        anyio.run(pipeline.run)
        for worker in pipeline.workers:
            worker.join(timeout=5.0)  # they end with the loop
        return _named(device.stored)


def _named(stored: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    found = {}
    for param, tensors in stored.items():
        module = param.rpartition(".")[0]
        found.update({f"{module}.{name}": tensor for name, tensor in tensors.items()})
    return found

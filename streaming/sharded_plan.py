"""The plan of a folder that save-shards wrote: every stored tensor is read as it is, nothing is quantized. [no-torch]

The tensors bear the names of the model's own parameters and of what their schemes keep beside them, so that nothing is
matched, fused or renamed: each stored tensor is there, in its shape and dtype, or the folder is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from layers.architecture import EMBED_WEIGHT
from layers.weights import LayerSpec, ParamSpec
from quant.int4 import ORDER
from quant.scheme import StoredSpec
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.load_plan import LoadItem, LoadPlan
from streaming.plan import checkpoint_error, lay_out
from streaming.plan_items import ITEM_NBYTES, runs_of_rows


def make_stored_plan(
    checkpoint: Checkpoint, specs: Sequence[LayerSpec], *, direct: bool, item_nbytes: int = ITEM_NBYTES
) -> LoadPlan:
    """Every stored tensor of every parameter, in reading order; `direct`: the device can be read into (the CPU).

    `specs`: of one rank. Where its files hold only its own rows of the embedding table, no rows can be fetched on their
    own: then the table is read first. Raises CheckpointError with all tensors that are missing, of another shape or
    dtype, or too many.
    """
    wanted = {full: spec for layer in specs for param in layer.params for full, spec in stored_names(param).items()}
    missing = [f"{name} is missing" for name in wanted if name not in checkpoint.tensors]
    wrong = list(_mismatches(wanted, checkpoint.tensors))
    if missing or wrong:
        raise checkpoint_error(checkpoint, (*missing, *wrong), missing=not wrong)
    table = next((param for layer in specs for param in layer.params if param.name == EMBED_WEIGHT), None)
    whole = table is not None and table.cut is None
    items_of = partial(_items_of, tensors=checkpoint.tensors, direct=direct, item_nbytes=item_nbytes)
    layers = lay_out(specs, items_of, table_first=not whole)
    return LoadPlan(layers, checkpoint.tensors[EMBED_WEIGHT] if whole else None, {}, specs=tuple(specs))


def stored_names(param: ParamSpec) -> dict[str, StoredSpec]:
    """The parameter's stored tensors by their full names. What goes with its rows (their scales) comes before them, so
    that rows can be used as soon as they are there."""
    module, _, leaf = param.name.rpartition(".")
    storage = sorted(param.storage().items(), key=lambda entry: entry[0] == leaf)
    return {f"{module}.{name}": spec for name, spec in storage}


def _mismatches(wanted: Mapping[str, StoredSpec], tensors: Mapping[str, TensorInfo]) -> Iterable[str]:
    for name, info in tensors.items():
        spec = wanted.get(name)
        if spec is None:
            yield f"{name} in {info.file.name}: nothing of the model is stored under this name"
        elif (info.shape, info.dtype) != (spec.shape, spec.dtype):
            yield (
                f"{name} in {info.file.name}: {info.dtype.value} {list(info.shape)}, but the model keeps "
                f"{spec.dtype.value} {list(spec.shape)}"
            )


def _items_of(
    param: ParamSpec,
    layer: str,
    numbers: Iterator[int],
    *,
    tensors: Mapping[str, TensorInfo],
    direct: bool,
    item_nbytes: int,
) -> Iterable[LoadItem]:
    for full in stored_names(param):
        info, name = tensors[full], full.rpartition(".")[2]
        rows = info.shape[0] if info.shape else 1
        straight = direct and name != ORDER  # whose numbers products believe: they are looked at on their way
        for run in runs_of_rows(info, (0, rows), item_nbytes=item_nbytes):
            yield LoadItem(
                next(numbers), layer, param, 0, info, run, run, straight, sections=len(param.sections), stored=name
            )

"""The load plan: which bytes of which file become which rows of which parameter, in which order. Pure, from headers.

Every parameter of the shell is *asked* which checkpoint tensor fills it (the weight map read backwards), so layer
order, missing names, wrong shapes, byte counts and the memory needed are all known before a weight byte is read, and
every problem that headers can show is in one report. This module imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from layers.architecture import EMBED_WEIGHT
from layers.weights import LayerSpec, WeightMap
from quant.dtypes import DType
from streaming.checkpoint.tensors import Checkpoint
from streaming.errors import CheckpointError, MissingTensorError, TensorMismatchError
from streaming.load_plan import LayerPlan as LayerPlan
from streaming.load_plan import LoadItem as LoadItem
from streaming.load_plan import LoadPlan as LoadPlan
from streaming.matching import Matching, match_names
from streaming.plan_items import ITEM_NBYTES as ITEM_NBYTES
from streaming.plan_items import Filling, ItemsOf, items_of

if TYPE_CHECKING:
    from quant.disk_forms.form import Method
    from streaming.leftovers import ReadTensor
    from streaming.rank_shares import Survey

_OWN_LAYOUT = ("gguf", "dummy")  # formats in which every matrix is [out, in], whatever the family's checkpoints do
Sharer = Callable[[Sequence[LayerPlan], Sequence[LayerSpec], Filling], tuple[LayerPlan, ...]]
"""(a rank's layers, all layers uncut, what they are filled from) -> its layers, saying what is read by which rank."""
Cutter = Callable[[Sequence[LayerSpec]], tuple[LayerSpec, ...]]  # all layers -> those of a rank, and what of them


def make_plan(
    checkpoint: Checkpoint,
    specs: Sequence[LayerSpec],
    weight_map: WeightMap,
    *,
    tied: bool,
    direct: bool,
    read: ReadTensor,
    strict: bool = True,
    unwrap: bool = False,
    method: Method | None = None,
    item_nbytes: int = ITEM_NBYTES,
    cut: Cutter | None = None,
    share: Sharer | None = None,
    survey: Survey | None = None,
) -> LoadPlan:
    """Join the shell's parameters with the checkpoint's tensors.

    `tied`: embedding and head are one matrix, stored under either name. `direct`: the device can be read into (the
    CPU). `read` gives the bytes of the few small tensors without a home that may be dropped for what they hold.
    `strict`: any other tensor without a home is a problem, not a warning. `unwrap`: names that a training wrapper
    changed are read. `method`: by which the checkpoint says that its weights are quantized. `cut` gives a
    rank's part of the layers (None: all of them), and `share` says what of it other ranks read (None: nothing).
    `survey` says what every rank has, for the plan's `ranks`. Raises CheckpointError with *all* problems.
    """
    if checkpoint.format in _OWN_LAYOUT:
        weight_map = replace(weight_map, transposed=())
    how = Matching(
        weight_map, tied, read,
        group_size=_group_size(checkpoint.config), method=method, strict=strict, unwrap=unwrap,
    )  # fmt: skip
    sources = match_names(checkpoint.tensors, specs, how)
    if sources.problems:
        missing = not (sources.mismatched or sources.homeless or sources.unreadable)
        raise checkpoint_error(checkpoint, sources.problems, missing=missing)
    mine = sources.specs if cut is None else cut(sources.specs)
    filling = Filling(sources, direct=direct, item_nbytes=item_nbytes, whole_rows=share is not None)
    layers = lay_out(mine, partial(items_of, filling=filling))
    if share is not None:
        layers = share(layers, sources.specs, filling)
    table = next(iter(sources.parts["model.embed_tokens.weight"].values()))[0]
    notes = (*sources.notes, *conversion_warnings(item for layer in layers for item in layer.items))
    dropped, unused = _account(checkpoint, sources.dropped)
    changed = mine if method is not None or cut is not None else ()
    ranks = () if survey is None else survey(sources.specs, filling)
    return LoadPlan(layers, table, dropped, notes, unused, sources.unwrapped, changed, ranks=ranks)


def _group_size(config: Mapping[str, Any]) -> int | None:
    """Inputs that share a scale, where the checkpoint says that it is quantized in groups."""
    quantized = config.get("quantization_config")
    size = quantized.get("group_size") if isinstance(quantized, Mapping) else None
    return size if type(size) is int else None


def _account(checkpoint: Checkpoint, dropped: Mapping[str, str]) -> tuple[dict[str, str], dict[str, int]]:
    """Every tensor that is not used with the reason, and the bytes of each reason (of unopened files: the file's)."""
    reasons, nbytes = dict(dropped), Counter[str]()
    for info in checkpoint.tensors.values():
        if info.name in dropped:
            nbytes[dropped[info.name]] += info.nbytes
    for file in checkpoint.unopened:
        reasons.update(file.reasons)
        nbytes[next(iter(file.reasons.values()))] += file.nbytes
    return reasons, {reason: amount for reason, amount in nbytes.items() if amount}


def lay_out(specs: Sequence[LayerSpec], items_of: ItemsOf, *, table_first: bool = False) -> tuple[LayerPlan, ...]:
    """The layers in reading order, with the items that fill each of their parameters; `table_first` as below."""
    layers, numbers = [], count()
    for spec in reading_order(specs, table_first=table_first):
        items = (item for param in spec.params for item in items_of(param, spec.name, numbers))
        layers.append(LayerPlan(spec.name, spec, tuple(items)))
    return tuple(layers)


def reading_order(specs: Sequence[LayerSpec], *, table_first: bool = False) -> list[LayerSpec]:
    """The decoder's layers, the head, then the embedding table: the prompt's rows of it are fetched first anyway.
    `table_first`: they cannot be, so the layer that has the table comes before all others."""
    if table_first:
        return sorted(specs, key=lambda spec: all(param.name != EMBED_WEIGHT for param in spec.params))
    return [spec for spec in specs if spec.name != "embed"] + [spec for spec in specs if spec.name == "embed"]


def checkpoint_error(checkpoint: Checkpoint, problems: tuple[str, ...], *, missing: bool) -> CheckpointError:
    """All problems in one error; `missing`: parameters without a tensor are all there is."""
    shown = problems[:40]
    more = [f"... and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
    head = f"{checkpoint.name}: {len(problems)} problem{'s' * (len(problems) > 1)} in the checkpoint"
    kind = MissingTensorError if missing else TensorMismatchError
    return kind("\n  ".join([head, *shown, *more]), problems)


def conversion_warnings(items: Iterable[LoadItem]) -> list[str]:
    """One warning for each pair of dtypes where a conversion loses something; exact widening is silent."""
    pairs: Counter[tuple[DType, DType]] = Counter()
    first: dict[tuple[DType, DType], str] = {}
    seen: set[str] = set()
    for item in items:
        source, target = item.tensor.dtype, item.param.dtype
        # From what is on disk: nothing is narrowed on the way.
        quantized = item.param.scheme.name != "none" or bool(item.leaf)
        if source is target or quantized or item.tensor.encoding or item.tensor.name in seen:
            continue
        if not _loses(source, target):
            continue
        seen.add(item.tensor.name)
        pairs[source, target] += 1
        first.setdefault((source, target), item.tensor.name)
    return [
        f"{count} tensor{'s' * (count > 1)} stored in {a.torch_name} become{'s' * (count == 1)} {b.torch_name} "
        f"(the first: {first[a, b]})"
        for (a, b), count in pairs.items()
    ]


_EXACT = {DType.BF16: (DType.F32, DType.F64), DType.F16: (DType.F32, DType.F64), DType.F32: (DType.F64,)}


def _loses(source: DType, target: DType) -> bool:
    return source is not target and target not in _EXACT.get(source, ())

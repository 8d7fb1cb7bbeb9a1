"""The load plan: which bytes of which file become which rows of which parameter, in which order. Pure, from headers.

Every parameter of the shell is *asked* which checkpoint tensor fills it (the weight map read backwards), so layer
order, missing names, wrong shapes, byte counts and the memory needed are all known before a weight byte is read, and
every problem that headers can show is in one report. This module imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm

from layers.weights import LayerSpec, ParamKind, ParamSpec, WeightMap
from quant.dtypes import DType
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.errors import CheckpointError, MissingTensorError, TensorMismatchError
from streaming.matching import Sources, match_names

ITEM_NBYTES = 32 << 20  # a larger weight is loaded in runs of rows of about this many bytes, where its scheme allows


@dataclass(frozen=True)
class LoadItem:
    """One run of rows of one section of one parameter, taken from one checkpoint tensor.

    `rows` counts within the checkpoint tensor, `section_rows` within the section. A direct item's bytes are its
    stored form: they are read straight into the memory where they stay. Others pass through the window.
    """

    index: int
    layer: str
    param: ParamSpec
    section: int
    tensor: TensorInfo
    rows: tuple[int, int]
    section_rows: tuple[int, int]
    direct: bool
    sections: int = 1  # how many sections, from `section` on, one tensor fills that can only be read whole

    @property
    def nbytes(self) -> int:
        """Bytes read for it."""
        if self.tensor.strides is not None:
            return self.tensor.nbytes
        return (self.rows[1] - self.rows[0]) * self.tensor.row_nbytes

    @property
    def file_offset(self) -> int:
        """Where its first byte lies in its file."""
        if self.tensor.strides is not None:
            return self.tensor.offset
        return self.tensor.offset + self.rows[0] * self.tensor.row_nbytes

    @property
    def ends_tensor(self) -> bool:
        """Whether this is the last run of its section."""
        return self.section_rows[1] == sum(self.param.section_rows[self.section : self.section + self.sections])


@dataclass(frozen=True)
class LayerPlan:
    """One layer's items, in the order in which they are read."""

    name: str
    spec: LayerSpec
    items: tuple[LoadItem, ...]

    @property
    def read_nbytes(self) -> int:
        """Bytes read for this layer."""
        return sum(item.nbytes for item in self.items)

    @property
    def kept_nbytes(self) -> int:
        """Bytes that stay in memory."""
        return sum(param.nbytes for param in self.spec.params)


@dataclass(frozen=True)
class LoadPlan:
    """The whole load, layers in reading order (which is not the order of use for the embedding table)."""

    layers: tuple[LayerPlan, ...]
    table: TensorInfo  # where embedding rows can be fetched on their own
    dropped: Mapping[str, str]  # checkpoint name -> why it is not used
    warnings: tuple[str, ...] = field(default=())

    @property
    def items(self) -> tuple[LoadItem, ...]:
        """All items in reading order."""
        return tuple(item for layer in self.layers for item in layer.items)

    @property
    def read_nbytes(self) -> int:
        """Bytes read from the files."""
        return sum(layer.read_nbytes for layer in self.layers)

    @property
    def kept_nbytes(self) -> int:
        """Bytes of all parameters in their stored form."""
        return sum(layer.kept_nbytes for layer in self.layers)

    @property
    def largest_staged_nbytes(self) -> int:
        """Bytes of the largest item that passes through the window; 0 when none does."""
        return max((item.nbytes for item in self.items if not item.direct), default=0)


def make_plan(
    checkpoint: Checkpoint,
    specs: Sequence[LayerSpec],
    weight_map: WeightMap,
    *,
    tied: bool,
    direct: bool,
    is_zero: Callable[[TensorInfo], bool],
    unwrap: bool = False,
    item_nbytes: int = ITEM_NBYTES,
) -> LoadPlan:
    """Join the shell's parameters with the checkpoint's tensors.

    `tied`: embedding and head are one matrix, stored under either name. `direct`: the device can be read into (the
    CPU). `is_zero` answers for the few small tensors without a home whether they hold only zeros. `unwrap`: read names
    as if a wrapper's prefix were not there. Raises CheckpointError with *all* problems.
    """
    sources = match_names(checkpoint.tensors, specs, weight_map, tied=tied, unwrap=unwrap, is_zero=is_zero)
    if sources.problems:
        raise _report(checkpoint, sources)
    layers, index = [], 0
    for spec in reading_order(specs):
        items: list[LoadItem] = []
        for param in spec.params:
            for run in _items_of(param, sources, direct=direct, item_nbytes=item_nbytes):
                items.append(LoadItem(index, spec.name, *run))
                index += 1
        layers.append(LayerPlan(spec.name, spec, tuple(items)))
    table = next(iter(sources.parts["model.embed_tokens.weight"].values()))[0]
    notes = (*sources.notes, *conversion_warnings(item for layer in layers for item in layer.items))
    return LoadPlan(tuple(layers), table, sources.dropped, notes)


def reading_order(specs: Sequence[LayerSpec]) -> list[LayerSpec]:
    """The decoder's layers, the head, then the embedding table: the prompt's rows of it are fetched first anyway."""
    return [spec for spec in specs if spec.name != "embed"] + [spec for spec in specs if spec.name == "embed"]


def _report(checkpoint: Checkpoint, sources: Sources) -> CheckpointError:
    problems = sources.problems
    shown = problems[:40]
    more = [f"... and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
    head = f"{checkpoint.root}: {len(problems)} problem{'s' * (len(problems) > 1)} in the checkpoint"
    kind = MissingTensorError if sources.missing and not sources.mismatched else TensorMismatchError
    return kind("\n  ".join([head, *shown, *more]), problems)


# --- items ----------------------------------------------------------------------------------------------------------

_Run = tuple[ParamSpec, int, TensorInfo, tuple[int, int], tuple[int, int], bool, int]


def _items_of(param: ParamSpec, sources: Sources, *, direct: bool, item_nbytes: int) -> Iterable[_Run]:
    for section, rows in enumerate(param.section_rows):
        info, first = sources.parts[param.name][section]
        if info.strides is not None:
            if first == 0:
                yield _whole(param, section, info)
            continue
        straight = direct and info.is_plain and info.dtype is param.dtype and param.scheme.name == "none"
        for start, stop in split_rows(param, info, rows, item_nbytes=item_nbytes):
            yield param, section, info, (first + start, first + stop), (start, stop), straight, 1


def _whole(param: ParamSpec, section: int, info: TensorInfo) -> _Run:
    """A tensor that can only be read whole, for all the sections that it fills."""
    rows, count = 0, 0
    while rows < info.shape[0]:
        rows += param.section_rows[section + count]
        count += 1
    return param, section, info, (0, rows), (0, rows), False, count


def split_rows(param: ParamSpec, info: TensorInfo, rows: int, *, item_nbytes: int) -> list[tuple[int, int]]:
    """Runs of rows that can be loaded by themselves: as many as fit item_nbytes, whole scale blocks, whole tensors
    where a scale or a permutation spans all rows."""
    multiple = row_multiple(param, info)
    row_nbytes = max(1, info.row_nbytes if info.is_plain else info.numel // info.shape[0] * DType.F32.itemsize)
    if multiple == 0 or rows * row_nbytes <= item_nbytes:
        return [(0, rows)]
    step = max(1, item_nbytes // (row_nbytes * multiple)) * multiple
    return [(start, min(rows, start + step)) for start in range(0, rows, step)]


def row_multiple(param: ParamSpec, info: TensorInfo) -> int:
    """Rows that must stay together: 1, whole scale blocks and whole heads, or 0 for all of the section."""
    blocks = param.scheme.row_multiple if param.kind in (ParamKind.LINEAR, ParamKind.HEAD) else 1
    return lcm(blocks, info.row_unit)  # 0 where the scheme wants all of them


def conversion_warnings(items: Iterable[LoadItem]) -> list[str]:
    """One warning for each pair of dtypes where a conversion loses something; exact widening is silent."""
    pairs: Counter[tuple[DType, DType]] = Counter()
    first: dict[tuple[DType, DType], str] = {}
    seen: set[str] = set()
    for item in items:
        source, target = item.tensor.dtype, item.param.dtype
        quantized = item.param.scheme.name != "none"  # from what is on disk: nothing is narrowed on the way
        if quantized or item.tensor.encoding or item.tensor.name in seen or not _loses(source, target):
            continue
        seen.add(item.tensor.name)
        pairs[source, target] += 1
        first.setdefault((source, target), item.tensor.name)
    return [
        f"{count} tensor{'s' * (count > 1)} stored in {a.torch_name} become{'s' * (count == 1)} {b.torch_name} "
        f"(the first: {first[a, b]})"
        for (a, b), count in pairs.items()
    ]


def _loses(source: DType, target: DType) -> bool:
    exact = {
        DType.BF16: (DType.F32, DType.F64),
        DType.F16: (DType.F32, DType.F64),
        DType.F32: (DType.F64,),
    }
    return source is not target and target not in exact.get(source, ())

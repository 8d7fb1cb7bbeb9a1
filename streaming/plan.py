"""The load plan: which bytes of which file become which rows of which parameter, in which order. Pure, from headers.

Every parameter of the shell is *asked* which checkpoint tensor fills it (the weight map read backwards), so layer
order, missing names, wrong shapes, byte counts and the memory needed are all known before a weight byte is read, and
every problem that headers can show is in one report. This module imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import lcm
from typing import TYPE_CHECKING, Any

from layers.weights import LayerSpec, ParamSpec, WeightMap
from quant.dtypes import DType
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.errors import CheckpointError, MissingTensorError, TensorMismatchError
from streaming.matching import Matching, Sources, match_names

if TYPE_CHECKING:
    from quant.disk_forms.form import DiskForm, Method
    from streaming.leftovers import ReadTensor

_OWN_LAYOUT = ("gguf", "dummy")  # formats in which every matrix is [out, in], whatever the family's checkpoints do
ITEM_NBYTES = 32 << 20  # a larger weight is loaded in runs of rows of about this many bytes, where its scheme allows


@dataclass(frozen=True)
class LoadItem:
    """One run of rows of one section of one parameter, taken from one checkpoint tensor.

    `rows` counts within the checkpoint tensor, `section_rows` within the section. A direct item's bytes are its
    stored form: they are read straight into the memory where they stay. Others pass through the window. Where `stored`
    is set, the checkpoint tensor is a whole stored tensor of the parameter, and both count its rows. `leaf` names one
    of the tensors that an already quantized weight is on disk, and `fills` what is made of it.
    """

    index: int
    layer: str
    param: ParamSpec
    section: int
    tensor: TensorInfo
    rows: tuple[int, int]
    section_rows: tuple[int, int]
    direct: bool
    sections: int = 1  # how many sections, from `section` on, one tensor fills
    stored: str | None = None  # the name of the stored tensor that it is rows of, where it is on disk in stored form
    leaf: str = ""  # the end of its name, where it is one tensor of a quantized weight's form on disk
    fills: str = ""  # the stored tensor that is made of it then
    completes: bool = False  # the last item of such a weight

    @property
    def form(self) -> DiskForm:
        """The form on disk of the weight that this is a part of; only of items with a `leaf`."""
        form = self.param.form_at(self.section)
        assert form is not None
        return form

    @property
    def stored_name(self) -> str:
        """The stored tensor that it fills, or the first of those."""
        return self.stored or self.fills or self.param.name.rpartition(".")[2]

    @property
    def read_nbytes(self) -> int:
        """Bytes that files are read for it: none where its numbers are made up."""
        return 0 if self.tensor.generated else self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of it that arrive."""
        if self.tensor.strides is not None:
            return self.tensor.nbytes
        return (self.rows[1] - self.rows[0]) * self.tensor.row_nbytes

    @property
    def file_offset(self) -> int:
        """Where its first byte lies in its file."""
        if self.tensor.strides is not None:
            return self.tensor.offset
        return self.tensor.offset + self.rows[0] * self.tensor.row_nbytes


@dataclass(frozen=True)
class LayerPlan:
    """One layer's items, in the order in which they are read."""

    name: str
    spec: LayerSpec
    items: tuple[LoadItem, ...]

    @cached_property
    def read_nbytes(self) -> int:
        """Bytes read for this layer."""
        return sum(item.read_nbytes for item in self.items)

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
    unused: Mapping[str, int] = field(default_factory=dict)  # why tensors are not used -> their bytes
    unwrapped: Mapping[str, str] = field(default_factory=dict)  # names without a wrapper's words -> as they are on disk
    specs: tuple[LayerSpec, ...] = ()  # the layers in the order of use, where their weights have forms on disk

    @cached_property
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

    @cached_property
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
    read: ReadTensor,
    strict: bool = True,
    unwrap: bool = False,
    method: Method | None = None,
    item_nbytes: int = ITEM_NBYTES,
) -> LoadPlan:
    """Join the shell's parameters with the checkpoint's tensors.

    `tied`: embedding and head are one matrix, stored under either name. `direct`: the device can be read into (the
    CPU). `read` gives the bytes of the few small tensors without a home that may be dropped for what they hold.
    `strict`: any other tensor without a home is a problem, not a warning. `unwrap`: names that a training wrapper
    changed are read. `method`: by which the checkpoint says that its weights are quantized. Raises CheckpointError with
    *all* problems.
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
    layers = lay_out(sources.specs, partial(_items_of, sources=sources, direct=direct, item_nbytes=item_nbytes))
    table = next(iter(sources.parts["model.embed_tokens.weight"].values()))[0]
    notes = (*sources.notes, *conversion_warnings(item for layer in layers for item in layer.items))
    dropped, unused = _account(checkpoint, sources.dropped)
    coded = sources.specs if method is not None else ()
    return LoadPlan(layers, table, dropped, notes, unused, sources.unwrapped, coded)


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


def lay_out(specs: Sequence[LayerSpec], runs_of: Callable[[ParamSpec], Iterable[Run]]) -> tuple[LayerPlan, ...]:
    """The layers in reading order, with the items that fill each of their parameters."""
    layers, index = [], 0
    for spec in reading_order(specs):
        items: list[LoadItem] = []
        for param in spec.params:
            for run in runs_of(param):
                items.append(LoadItem(index, spec.name, *run))
                index += 1
        layers.append(LayerPlan(spec.name, spec, tuple(items)))
    return tuple(layers)


def reading_order(specs: Sequence[LayerSpec]) -> list[LayerSpec]:
    """The decoder's layers, the head, then the embedding table: the prompt's rows of it are fetched first anyway."""
    return [spec for spec in specs if spec.name != "embed"] + [spec for spec in specs if spec.name == "embed"]


def checkpoint_error(checkpoint: Checkpoint, problems: tuple[str, ...], *, missing: bool) -> CheckpointError:
    """All problems in one error; `missing`: parameters without a tensor are all there is."""
    shown = problems[:40]
    more = [f"... and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
    head = f"{checkpoint.name}: {len(problems)} problem{'s' * (len(problems) > 1)} in the checkpoint"
    kind = MissingTensorError if missing else TensorMismatchError
    return kind("\n  ".join([head, *shown, *more]), problems)


# --- items ----------------------------------------------------------------------------------------------------------

Run = tuple[ParamSpec, int, TensorInfo, tuple[int, int], tuple[int, int], bool, int, str | None, str, str, bool]


def _items_of(param: ParamSpec, *, sources: Sources, direct: bool, item_nbytes: int) -> Iterable[Run]:
    if not param.forms:
        sections = range(len(param.sections))
        yield from _wide_items(param, sections, sources=sources, direct=direct, item_nbytes=item_nbytes)
        return
    section = 0
    for run, count in enumerate(param.runs):
        if param.forms[run] is None:
            sections = range(section, section + count)
            yield from _wide_items(param, sections, sources=sources, direct=direct, item_nbytes=item_nbytes)
        else:
            tensors = sources.coded[param.name][run]
            yield from form_items(param, run, section, tensors, direct=direct, item_nbytes=item_nbytes)
        section += count


def form_items(
    param: ParamSpec,
    run: int,
    section: int,
    tensors: Mapping[str, TensorInfo],
    *,
    direct: bool,
    item_nbytes: int = ITEM_NBYTES,
) -> Iterable[Run]:
    """The tensors of a run of sections (from `section` on) that is quantized on disk, by leaf; those whose rows are
    kept as they are in runs of rows, others whole."""
    from quant.disk_forms.form import disk_tensors

    form = param.forms[run]
    assert form is not None
    rows, count = param.run_rows[run], param.runs[run]
    wanted = [one for one in disk_tensors(form, rows, param.shape[1]) if one.fills and one.leaf in tensors]
    for one in wanted:
        info, last = tensors[one.leaf], one is wanted[-1]
        if not one.as_is or info.strides is not None or info.row_unit > 1:
            run_rows = max((1, *info.shape[:1]))
            yield param, section, info, (0, run_rows), (0, rows), False, count, None, one.leaf, one.fills, last
            continue
        if info.shape[0] != rows:  # the same bytes in another shape
            info = replace(info, shape=(rows, info.numel // rows))
        straight = direct and param.kept_as_stored and info.is_plain
        step = max(1, item_nbytes // max(1, info.row_nbytes))
        for start in range(0, rows, step):
            part = (start, min(rows, start + step))
            ends = last and part[1] == rows
            yield param, section, info, part, part, straight, count, None, one.leaf, one.fills, ends


def _wide_items(
    param: ParamSpec, sections: Iterable[int], *, sources: Sources, direct: bool, item_nbytes: int
) -> Iterable[Run]:
    parts, plain = sources.parts[param.name], direct and param.scheme.name == "none"
    for section in sections:
        rows = param.section_rows[section]
        info, first = parts[section]
        if info.strides is not None or info.row_unit > rows:  # several sections may be strewn over it
            if first == 0:
                yield _whole(param, section, info)
            continue
        straight = plain and info.dtype is param.dtype and info.is_plain
        for start, stop in split_rows(param, info, rows, item_nbytes=item_nbytes):
            yield param, section, info, (first + start, first + stop), (start, stop), straight, 1, None, "", "", False


def _whole(param: ParamSpec, section: int, info: TensorInfo) -> Run:
    """A tensor that can only be read whole, for all the sections that it fills."""
    rows, count = 0, 0
    while rows < info.shape[0]:
        rows += param.section_rows[section + count]
        count += 1
    return param, section, info, (0, rows), (0, rows), False, count, None, "", "", False


def split_rows(param: ParamSpec, info: TensorInfo, rows: int, *, item_nbytes: int) -> list[tuple[int, int]]:
    """Runs of rows that can be loaded by themselves: as many as fit item_nbytes, whole scale blocks, whole tensors
    where a scale or a permutation spans all rows."""
    row_nbytes = max(1, info.row_nbytes if info.is_plain else info.numel // info.shape[0] * DType.F32.itemsize)
    if rows * row_nbytes <= item_nbytes or (multiple := row_multiple(param, info)) == 0:
        return [(0, rows)]
    step = max(1, item_nbytes // (row_nbytes * multiple)) * multiple
    return [(start, min(rows, start + step)) for start in range(0, rows, step)]


def row_multiple(param: ParamSpec, info: TensorInfo) -> int:
    """Rows that must stay together: 1, whole scale blocks and whole heads, or 0 for all of the section."""
    blocks = param.scheme.row_multiple if param.kind.has_scheme else 1
    return lcm(blocks, info.row_unit)  # 0 where the scheme wants all of them


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

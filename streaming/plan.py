"""The load plan: which bytes of which file become which rows of which parameter, in which order. Pure, from headers.

Every parameter of the shell is *asked* which checkpoint tensor fills it (the weight map read backwards), so layer
order, missing names, wrong shapes, byte counts and the memory needed are all known before a weight byte is read, and
every problem that headers can show is in one report. This module imports no torch.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm

from layers.weights import Dropped, LayerSpec, ParamKind, ParamSpec, Target, WeightMap
from quant.dtypes import DType
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.errors import CheckpointError, MissingTensorError, TensorMismatchError

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

    @property
    def nbytes(self) -> int:
        """Bytes read for it."""
        return (self.rows[1] - self.rows[0]) * self.tensor.row_nbytes

    @property
    def file_offset(self) -> int:
        """Where its first byte lies in its file."""
        return self.tensor.offset + self.rows[0] * self.tensor.row_nbytes

    @property
    def ends_tensor(self) -> bool:
        """Whether this is the last run of its section."""
        return self.section_rows[1] == self.param.sections[self.section].rows


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


# --- names ----------------------------------------------------------------------------------------------------------


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


def _report(checkpoint: Checkpoint, sources: Sources) -> CheckpointError:
    problems = sources.problems
    shown = problems[:40]
    more = [f"... and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
    head = f"{checkpoint.root}: {len(problems)} problem{'s' * (len(problems) > 1)} in the checkpoint"
    kind = MissingTensorError if sources.missing and not sources.mismatched else TensorMismatchError
    return kind("\n  ".join([head, *shown, *more]), problems)


# --- items ----------------------------------------------------------------------------------------------------------

_Run = tuple[ParamSpec, int, TensorInfo, tuple[int, int], tuple[int, int], bool]


def _items_of(param: ParamSpec, sources: Sources, *, direct: bool, item_nbytes: int) -> Iterable[_Run]:
    for section, rows in enumerate(param.section_rows):
        info, first = sources.parts[param.name][section]
        straight = direct and info.is_plain and info.dtype is param.dtype and param.scheme.name == "none"
        for start, stop in split_rows(param, info, rows, item_nbytes=item_nbytes):
            yield param, section, info, (first + start, first + stop), (start, stop), straight


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

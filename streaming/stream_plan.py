"""The weights that may be streamed, as data: which they are, in which order they are used, which of them stay.

A *unit* is what is brought in at once: one projection of one layer, or a run of the head's rows (those that the head
multiplies at once). Norms, biases, routers, what attention absorbs and the like are small and stay, whatever the limit;
experts come when tokens are routed to them (streaming.expert_plan). [no-torch]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

from layers.architecture import CHUNK_ROWS, EMBED_WEIGHT
from layers.weights import LayerSpec, ParamKind, ParamSpec, Section
from quant.dtypes import DType
from quant.int4 import ORDER
from quant.scheme import StoredSpec
from quant.sections import rows_at_once
from streaming.file_runs import FileRun, file_runs
from streaming.load_plan import LayerPlan, LoadItem, LoadPlan
from streaming.read_plan import ALIGNMENT, aligned
from streaming.residents import choose_residents, fill_up
from streaming.ring import Ring

MAKING_THREADS = 2  # that make units of what is on disk at once
RING_STEPS = 16  # in which sizes of a ring are tried, of the largest unit
LEAST_RING_NBYTES = 64 << 20  # where there is so much to stream: a reader that is never idle needs some room ahead


@dataclass(frozen=True)
class Unit:
    """Rows [first, ...) of a parameter of `layer`; `param` has these rows alone, and `items` fill it."""

    name: str
    layer: str
    param: ParamSpec
    items: tuple[LoadItem, ...]
    first: int = 0
    is_part: bool = False  # of a parameter that is several units

    @cached_property
    def storage(self) -> dict[str, StoredSpec]:
        """What is kept for it."""
        return self.param.storage()

    @cached_property
    def nbytes(self) -> int:
        """Bytes that it takes, each stored tensor at an aligned address."""
        return sum(aligned(spec.nbytes) for spec in self.storage.values())

    @cached_property
    def is_straight(self) -> bool:
        """Whether its stored form lies in the files, byte for byte."""
        return all(item.direct for item in self.items)

    @cached_property
    def file_runs(self) -> dict[str, tuple[FileRun, ...]]:
        """Where the stored tensors lie, of those that products could use in their files: in one run each; a wide weight
        also in several, the projections that it joins."""
        if not self.is_straight:
            return {}
        found = {}
        for name, spec in self.storage.items():
            runs = file_runs([item for item in self.items if item.stored_name == name])
            may_be_apart = self.param.scheme.name == "none"
            if (len(runs) == 1 or may_be_apart) and all(run.offset % _alignment(spec.dtype) == 0 for run in runs):
                found[name] = runs
        return {name: runs for name, runs in found.items() if runs}

    def first_of(self, run: FileRun) -> LoadItem:
        """The item that a run of a file begins with."""
        return next(item for item in self.items if (item.tensor.file, item.file_offset) == (run.file, run.offset))

    @cached_property
    def is_worth_keeping(self) -> bool:
        """Whether its stored form is kept on disk once it has been made: where it is quantized, so that this is done
        once, or smaller than what it is made of."""
        if self.is_straight:
            return False
        made = self.param.is_quantized and not self.param.kept_as_stored
        return made or sum(spec.nbytes for spec in self.storage.values()) < self.read_nbytes

    @property
    def read_nbytes(self) -> int:
        """Bytes read to make it from the checkpoint."""
        return sum(item.read_nbytes for item in self.items)

    @property
    def again_nbytes(self) -> int:
        """Bytes read to bring it in for the second time and ever after."""
        return self.nbytes if self.is_worth_keeping else self.read_nbytes


@dataclass(frozen=True)
class StreamPlan:
    """All units in the order of use, those that stay (`kept`, by name), and the memory that the others pass through."""

    units: tuple[Unit, ...]
    kept: frozenset[str]
    ring_nbytes: int
    has_table: bool  # whether tokens have to be looked up in the embedding table
    experts_nbytes: int = 0  # memory for experts that come when tokens are routed to them
    staging_nbytes: int = 0  # of the host's memory beside a GPU's: what units pass through on their way
    tier: frozenset[str] = frozenset()  # streamed units that the host keeps, beside a GPU

    @cached_property
    def streamed(self) -> tuple[Unit, ...]:
        """What comes anew in every pass."""
        return tuple(unit for unit in self.units if unit.name not in self.kept)

    @property
    def params(self) -> frozenset[str]:
        """The parameters that the units are of."""
        return frozenset(unit.param.name for unit in self.units)

    @property
    def making_threads(self) -> int:
        """How many threads make units of what is on disk; none where all lie there as they are kept."""
        return 0 if all(unit.is_straight for unit in self.units) else MAKING_THREADS

    @cached_property
    def loaded(self) -> frozenset[str]:
        """Units that the pipeline loads with the layers: parameters that stay whole."""
        partly = {unit.param.name for unit in self.streamed}
        return frozenset(unit.name for unit in self.units if unit.param.name not in partly)

    @property
    def own_nbytes(self) -> int:
        """Bytes of units that stay and come through the stream: parts of a parameter of which others do not."""
        return sum(unit.nbytes for unit in self.units if unit.name in self.kept and unit.name not in self.loaded)

    @property
    def pass_nbytes(self) -> int:
        """Bytes, in their stored form, that come anew in every pass."""
        return sum(unit.nbytes for unit in self.streamed)

    @property
    def pass_read_nbytes(self) -> int:
        """Bytes that are read for that: what is made anew each time is read as it lies in the files."""
        return sum(unit.again_nbytes for unit in self.streamed)

    @property
    def tier_nbytes(self) -> int:
        """Bytes of streamed units that the host keeps, beside a GPU."""
        return sum(unit.nbytes for unit in self.units if unit.name in self.tier)

    @property
    def pass_disk_nbytes(self) -> int:
        """Bytes that are read from the disk in each pass, once the host has what it keeps."""
        return sum(unit.again_nbytes for unit in self.streamed if unit.name not in self.tier)

    @property
    def hit_rate(self) -> float:
        """The share of the bytes of all units that is in memory when a pass begins, whatever the ring holds."""
        total = sum(unit.nbytes for unit in self.units)
        return 1.0 if not total else 1 - self.pass_nbytes / total

    def layers(self, *, kept: bool) -> tuple[str, ...]:
        """The layers of which all units stay, or those of which some are streamed, in the order of use."""
        partly = {unit.layer for unit in self.streamed}
        names = dict.fromkeys(unit.layer for unit in self.units)
        return tuple(name for name in names if (name not in partly) == kept)


def is_streamable(param: ParamSpec, layer: str) -> bool:
    """Whether it is one of the large weights, read once in every pass."""
    if param.kind is ParamKind.LINEAR:
        return param.sharding.experts == 0
    return param.kind is ParamKind.HEAD or (param.kind is ParamKind.EMBEDDING and layer == "head")


def _alignment(dtype: DType) -> int:
    """Of an address at which a product has the bits that it has at any other. Those of bfloat16 load unaligned numbers
    whatever they are given (compared for 1 to 300 rows with AVX512, AMX and AVX2); in float32 one row's differ."""
    return dtype.itemsize if dtype is DType.BF16 else ALIGNMENT


def lies_as_stored(item: LoadItem) -> bool:
    """Whether the item's bytes in its file are its stored form; what the plan of a load to the CPU calls direct."""
    if item.stored is not None:
        return item.stored != ORDER
    if item.sections != 1 and not item.leaf:
        return False  # one tensor that is strewn over several sections
    if not item.tensor.is_plain or item.tensor.strides is not None or item.tensor.row_unit > 1:
        return False
    if not item.leaf:
        return not item.param.is_quantized and item.tensor.dtype is item.param.dtype
    return item.param.kept_as_stored and item.is_as_stored


def units_of(plan: LoadPlan, *, has_table: bool) -> tuple[Unit, ...]:
    """Every unit of a plan, in the order of use. A tied table is the head's weight, unless that is quantized; with
    `has_table` it stays where it is, since tokens are looked up in it."""
    found: list[Unit] = []
    for layer in sorted(plan.layers, key=lambda layer: layer.name == "head"):  # behind the table, which is no unit
        has_head = any(param.kind is ParamKind.HEAD for param in layer.spec.params)
        for param in layer.spec.params:
            is_table = param.kind is ParamKind.EMBEDDING
            if is_streamable(param, layer.name) and not (is_table and (has_head or has_table)):
                items = tuple(_as_unit(item) for item in layer.items if item.param.name == param.name)
                found += _units(param, layer.name, items)
    return tuple(found)


def _as_unit(item: LoadItem) -> LoadItem:
    """The item as a unit reads it: into memory of the host, also where the device is another."""
    return replace(item, direct=True) if not item.direct and lies_as_stored(item) else item


def _units(param: ParamSpec, layer: str, items: tuple[LoadItem, ...]) -> Iterator[Unit]:
    if param.kind is ParamKind.LINEAR:
        yield Unit(param.name, layer, param, items)
        return
    if not _can_be_parted(param, items):
        return  # a head that is only multiplied whole stays
    multiple = param.scheme.row_multiple if param.kind.has_scheme else 1
    step, rows = rows_at_once(CHUNK_ROWS, multiple=multiple), param.shape[0]
    for first in range(0, rows, step):
        stop = min(rows, first + step)
        part = replace(param, shape=(stop - first, *param.shape[1:]), sections=(Section("", stop - first),))
        yield Unit(f"{param.name}[{first}:{stop}]", layer, part, tuple(_rows_of(items, part, first, stop)), first, True)


def _can_be_parted(param: ParamSpec, items: Sequence[LoadItem]) -> bool:
    """Whether any run of its rows can be made of the same rows of one tensor."""
    if param.forms or param.runs or (param.kind.has_scheme and param.scheme.row_multiple == 0):
        return False
    return all(
        item.tensor.strides is None and not item.leaf and item.tensor.row_unit == 1 and item.stored in (None, "weight")
        and len({other.tensor.name for other in items}) == 1
        for item in items
    )  # fmt: skip


def _rows_of(items: Sequence[LoadItem], part: ParamSpec, first: int, stop: int) -> Iterator[LoadItem]:
    for item in items:
        start, end = max(first, item.section_rows[0]), min(stop, item.section_rows[1])
        if start < end:
            shift = item.rows[0] - item.section_rows[0]
            rows = (start - first, end - first)
            if item.stored is not None:  # both count rows of the stored tensor: the part's own begin at 0
                tensor = replace(item.tensor, shape=(stop - first, *item.tensor.shape[1:]),
                                 offset=item.tensor.offset + first * item.tensor.row_nbytes)  # fmt: skip
                yield replace(item, param=part, tensor=tensor, rows=rows, section_rows=rows)
            else:
                yield replace(item, param=part, rows=(start + shift, end + shift), section_rows=rows)


def ring_nbytes(units: Sequence[Unit], *, room_nbytes: int) -> int:
    """The ring for these units: the smallest in which the next one always has room while one is used, and some more
    where they are small; less where there is less room, but never less than the largest."""
    sizes = [unit.nbytes for unit in units]
    largest, total = max(sizes, default=0), sum(sizes)
    steps = (largest + largest * step // RING_STEPS for step in range(2 * RING_STEPS))
    wanted = next((nbytes for nbytes in steps if has_room_ahead(sizes, nbytes)), 3 * largest)
    return max(largest, min(total, max(wanted, LEAST_RING_NBYTES), room_nbytes // 3))


def has_room_ahead(sizes: Sequence[int], capacity: int) -> bool:
    """Whether units of these sizes, used one after the other and round again, always find room for the next one while
    one is used, in a ring that is filled as far as it goes."""
    ring, held = Ring(capacity), deque[int]()
    coming = (size for _ in range(3) for size in sizes)
    following = next(coming, None)
    while following is not None:
        while following is not None and (start := ring.place(following)) is not None:
            held.append(start)
            following = next(coming, None)
        if len(held) < 2 and following is not None:
            return False
        ring.free(held.popleft())
    return True


def choose_kept(units: Sequence[Unit], *, room_nbytes: int) -> frozenset[str]:
    """The units that stay in so many bytes: those of whole layers, spread evenly, then single ones."""
    layers: dict[str, int] = {}
    for unit in units:
        layers[unit.layer] = layers.get(unit.layer, 0) + unit.nbytes
    whole = set(choose_residents(list(layers.items()), room_nbytes=room_nbytes))
    left = room_nbytes - sum(nbytes for name, nbytes in layers.items() if name in whole)
    single = fill_up({unit.name: unit.nbytes for unit in units if unit.layer not in whole}, room_nbytes=left)
    return frozenset(unit.name for unit in units if unit.layer in whole) | frozenset(single)


def without_units(plan: LoadPlan, stream: StreamPlan) -> LoadPlan:
    """The load of what stays, but for parts of a parameter of which others do not: those come through the stream."""
    apart = {unit.param.name for unit in stream.streamed}
    if not stream.has_table and all(unit.param.name != EMBED_WEIGHT for unit in stream.units):
        apart.add(EMBED_WEIGHT)  # no head, and its rows are fetched
    numbers = count()
    return replace(plan, layers=tuple(_without(layer, apart, numbers) for layer in plan.layers), stream=stream)


def _without(layer: LayerPlan, apart: Collection[str], numbers: Iterator[int]) -> LayerPlan:
    params = tuple(param for param in layer.spec.params if param.name not in apart)
    items = tuple(replace(item, index=next(numbers)) for item in layer.items if item.param.name not in apart)
    return LayerPlan(layer.name, LayerSpec(layer.name, params), items)

"""The items that fill one parameter: which rows of which tensors, in runs that can be loaded alone. [no-torch]"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import lcm

from layers.weights import ParamSpec
from quant.disk_forms.form import disk_tensors
from quant.dtypes import DType
from streaming.checkpoint.tensors import TensorInfo
from streaming.load_plan import LoadItem
from streaming.matching import Sources

ITEM_NBYTES = 32 << 20  # a larger weight is loaded in runs of rows of about this many bytes, where its scheme allows
ItemsOf = Callable[[ParamSpec, str, Iterator[int]], Iterable[LoadItem]]
"""(parameter, its layer, the numbers that items get) -> the items that fill it, in reading order."""


@dataclass(frozen=True)
class Filling:
    """What parameters are filled from, and how: `direct`: the device can be read into (the CPU); `whole_rows`: whole
    rows are read, for all ranks at once, rather than columns whose gaps are read along."""

    sources: Sources
    direct: bool
    item_nbytes: int = ITEM_NBYTES
    whole_rows: bool = False


def items_of(param: ParamSpec, layer: str, numbers: Iterator[int], *, filling: Filling) -> Iterable[LoadItem]:
    """The items of a parameter, cut over ranks or not."""
    if param.is_cut_within:
        from streaming.cut_items import cut_items_of

        yield from cut_items_of(param, layer, numbers, filling=filling)
        return
    section = 0
    for run, sections in enumerate(param.runs if param.forms else (len(param.sections),)):
        covered = range(section, section + sections)
        if param.forms and param.forms[run] is not None:
            yield from _form_items(param, run, section, layer, numbers, filling=filling)
        else:
            yield from _wide_items(param, covered, layer, numbers, filling=filling)
        section += sections


def _form_items(
    param: ParamSpec, run: int, section: int, layer: str, numbers: Iterator[int], *, filling: Filling
) -> Iterable[LoadItem]:
    """The tensors of a run of sections (from `section` on) that is quantized on disk, by leaf; those whose rows are
    kept as they are in runs of rows, others whole."""
    form = param.forms[run]
    assert form is not None
    rows, count = param.run_rows[run], param.runs[run]
    tensors = filling.sources.coded[param.name][param.run_of(section)]
    wanted = [one for one in disk_tensors(form, rows, param.shape[1]) if one.fills and one.leaf in tensors]
    for one in wanted:
        info, last = tensors[one.leaf], one is wanted[-1]
        if not one.as_is or info.strides is not None or info.row_unit > 1:
            run_rows = max((1, *info.shape[:1]))
            yield LoadItem(
                next(numbers), layer, param, section, info, (0, run_rows), (0, rows), direct=False, sections=count,
                leaf=one.leaf, fills=one.fills, completes=last,
            )  # fmt: skip
            continue
        info = as_rows(info, rows)
        straight = filling.direct and param.kept_as_stored and info.is_plain
        for part in runs_of_rows(info, (0, rows), item_nbytes=filling.item_nbytes):
            yield LoadItem(
                next(numbers), layer, param, section, info, part, part, direct=straight, sections=count,
                leaf=one.leaf, fills=one.fills, completes=last and part[1] == rows,
            )  # fmt: skip


def as_rows(info: TensorInfo, rows: int) -> TensorInfo:
    """The same bytes as so many rows."""
    return info if info.shape[:1] == (rows,) or not rows else replace(info, shape=(rows, info.numel // rows))


def runs_of_rows(info: TensorInfo, rows: tuple[int, int], *, item_nbytes: int) -> Iterator[tuple[int, int]]:
    """Rows [first, stop) in runs of about `item_nbytes` bytes; an empty one where there are none."""
    first, stop = rows
    step = max(1, item_nbytes // max(1, info.row_nbytes))
    yield from ((start, min(stop, start + step)) for start in range(first, max(stop, first + 1), step))


def _wide_items(
    param: ParamSpec, sections: Iterable[int], layer: str, numbers: Iterator[int], *, filling: Filling
) -> Iterable[LoadItem]:
    sources, plain = filling.sources.parts[param.name], filling.direct and param.scheme.name == "none"
    for section in sections:
        rows = param.section_rows[section]
        info, first = sources[param.parts[section].section]
        if info.strides is not None or info.row_unit > rows:  # several sections may be strewn over it
            if first == 0:
                yield _whole(param, section, info, layer, numbers)
            continue
        straight = plain and info.dtype is param.dtype and info.is_plain
        for start, stop in split_rows(param, info, rows, item_nbytes=filling.item_nbytes):
            yield LoadItem(
                next(numbers), layer, param, section, info, (first + start, first + stop), (start, stop), straight
            )


def _whole(param: ParamSpec, section: int, info: TensorInfo, layer: str, numbers: Iterator[int]) -> LoadItem:
    """A tensor that can only be read whole, for all the sections that it fills."""
    rows, count = 0, 0
    while rows < info.shape[0]:
        rows += param.section_rows[section + count]
        count += 1
    return LoadItem(next(numbers), layer, param, section, info, (0, rows), (0, rows), direct=False, sections=count)


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

"""The items of a parameter that is cut over ranks: rows as ranges, columns in the cheaper way. [no-torch]

Columns of rows that lie one after the other are read alone where that is worth it (streaming.column_reads), else whole
rows are read and cut. A tensor whose rows are no runs of bytes is read as the least stretch that holds what is wanted,
or whole where several sections are strewn over it. Of a weight that is quantized on disk, tensors whose rows are kept
as they are come by rows; others (scales, permuted codes) whole, to be cut once they are what is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from layers.cuts import scale_scope
from layers.weights import ParamSpec
from quant.cells import cells
from quant.disk_forms.form import DiskForm, DiskTensor, disk_tensors
from quant.dtypes import DType
from quant.shared_scales import Scope
from streaming.checkpoint.tensors import TensorInfo
from streaming.column_reads import reads_columns, skips_gaps
from streaming.load_plan import LoadItem
from streaming.plan_items import Filling, as_rows, runs_of_rows, split_rows

Span = tuple[int, int]


def cut_items_of(param: ParamSpec, layer: str, numbers: Iterator[int], *, filling: Filling) -> Iterable[LoadItem]:
    """The items of this rank's part of a parameter."""
    make = _Maker(param, layer, numbers, filling)
    whole = param.whole
    for run, sections in groupby(range(len(param.sections)), key=param.run_of):
        form = whole.forms[run] if whole.forms else None
        if form is None:
            yield from make.wide(tuple(sections))
        else:
            yield from make.coded(run, form, tuple(sections))


@dataclass(frozen=True)
class _Maker:
    param: ParamSpec
    layer: str
    numbers: Iterator[int]
    filling: Filling

    # --- wide on disk

    def wide(self, sections: Sequence[int]) -> Iterator[LoadItem]:
        """Sections that are wide on disk."""
        sources = self.filling.sources.parts[self.param.name]
        for _, group in groupby(sections, key=lambda s: id(sources[self.param.parts[s].section][0])):
            same = tuple(group)
            info = sources[self.param.parts[same[0]].section][0]
            firsts = [sources[self.param.parts[s].section][1] for s in same]
            yield from self._of_tensor(info, same, firsts)

    def _of_tensor(self, info: TensorInfo, sections: Sequence[int], firsts: Sequence[int]) -> Iterator[LoadItem]:
        spans = [self._rows_of(section, first) for section, first in zip(sections, firsts, strict=True)]
        if (halves := _interleaved(info, spans)) is not None:
            rows = (0, halves.shape[0])
            yield self._item(sections[0], halves, rows, rows, sections=len(sections))
            return
        unit = info.row_unit
        if info.strides is not None and len(sections) == 1 and not info.rope_heads:
            yield from self._of_strided(info, sections[0], spans[0])
        elif info.strides is not None or any(edge % unit for span in spans for edge in span):
            yield self._of_whole(info, sections, spans)
        else:
            for section, span in zip(sections, spans, strict=True):
                yield from self._of_rows(info, section, span)

    def _rows_of(self, section: int, first: int) -> Span:
        """The rows of a tensor that a section of this rank is made from; all of the uncut section where it must be
        quantized whole."""
        part = self.param.parts[section]
        if self._is_quantized_whole(section):
            return first, first + self.param.whole.section_rows[part.section]
        return first + part.start, first + part.stop

    def _is_quantized_whole(self, section: int) -> bool:
        """Whether a scale of it, which is not agreed on, is of rows that other ranks have."""
        part = self.param.parts[section]
        rows = (0, self.param.whole.section_rows[part.section])
        return scale_scope(self.param, section) is Scope.WHOLE and (part.start, part.stop) != rows

    def _of_rows(self, info: TensorInfo, section: int, span: Span) -> Iterator[LoadItem]:
        param, rows = self.param, span[1] - span[0]
        whole = scale_scope(param, section) is Scope.WHOLE
        packed, stride, columns = self._in_columns(info, whole=whole)
        plain = param.scheme.name == "none" and info.dtype is param.dtype and packed.is_plain
        direct = self.filling.direct and plain and columns is None
        for start, stop in self._runs(info, section, rows):
            own = (0, param.section_rows[section]) if self._is_quantized_whole(section) else (start, stop)
            yield replace(
                self._item(section, packed, (span[0] + start, span[0] + stop), own),
                columns=columns, stride_nbytes=stride, direct=direct, scales_of_all=whole,
            )  # fmt: skip

    def _runs(self, info: TensorInfo, section: int, rows: int) -> list[Span]:
        """Runs of rows: on all ranks the same ones where scales are agreed, so that each run is agreed at once."""
        if self._columns is None and scale_scope(self.param, section) is not Scope.OWN:
            return [(0, rows)]  # ranks have other rows: a section at once
        return split_rows(self.param.whole, info, rows, item_nbytes=self.filling.item_nbytes)

    def _in_columns(self, info: TensorInfo, *, whole: bool) -> tuple[TensorInfo, int, Span | None]:
        """The tensor as it is read, how far its rows are apart if only some columns of it are, and the columns to be
        cut out of what is read. `whole`: all columns are needed first."""
        columns = self._columns
        if columns is None:
            return info, 0, None
        found = None if whole else columns_alone(info, columns, whole_rows=self.filling.whole_rows)
        return (info, 0, columns) if found is None else (found, info.row_nbytes, None)

    def _of_strided(self, info: TensorInfo, section: int, span: Span) -> Iterator[LoadItem]:
        """The least stretch of bytes that holds this rank's rows and columns."""
        whole = scale_scope(self.param, section) is Scope.WHOLE
        columns = self._columns if not whole and self._columns else (0, info.shape[-1])
        part = stretch(info, span, columns if len(info.shape) > 1 else None)
        yield replace(
            self._item(section, part, (0, part.shape[0]), (0, self.param.section_rows[section])),
            columns=self._columns if whole else None,
            scales_of_all=whole,
        )

    @property
    def _columns(self) -> Span | None:
        return self.param.cut.columns if self.param.cut is not None else None

    def _of_whole(self, info: TensorInfo, sections: Sequence[int], spans: Sequence[Span]) -> LoadItem:
        rows = sum(self.param.section_rows[section] for section in sections)
        return replace(
            self._item(sections[0], info, (0, info.shape[0]), (0, rows), sections=len(sections)),
            picked=tuple(spans),
            columns=self._columns,
            scales_of_all=any(scale_scope(self.param, section) is Scope.WHOLE for section in sections),
        )

    def _item(self, section: int, info: TensorInfo, rows: Span, section_rows: Span, *, sections: int = 1) -> LoadItem:
        return LoadItem(
            next(self.numbers), self.layer, self.param, section, info, rows, section_rows, False, sections=sections
        )

    # --- quantized on disk

    def coded(self, run: int, form: DiskForm, sections: Sequence[int]) -> Iterator[LoadItem]:
        """The sections of one run, by leaf: what is kept as it is by rows, other leaves whole."""
        whole = self.param.whole
        tensors = self.filling.sources.coded[self.param.name][run]
        wanted = [
            one for one in disk_tensors(form, whole.run_rows[run], whole.shape[1]) if one.fills and one.leaf in tensors
        ]
        last = {one.fills: one.leaf for one in wanted}
        for one in wanted:
            info = tensors[one.leaf]
            by_rows = one.as_is and info.strides is None and info.row_unit == 1
            ends = one is wanted[-1] or (whole.kept_as_stored and last[one.fills] == one.leaf)
            if not by_rows:
                yield self._leaf_whole(one, info, sections, ends=ends)
            elif whole.kept_as_stored and self._is_kept_by_rows(one, form):
                yield from self._leaf_kept(one, as_rows(info, whole.run_rows[run]), form, sections)
            else:
                yield from self._leaf_held(one, as_rows(info, whole.run_rows[run]), sections, ends=ends)

    def _is_kept_by_rows(self, one: DiskTensor, form: DiskForm) -> bool:
        """Whether rows on disk are rows of what is kept of a part, too: not where a group or block is cut, whose scale
        is then repeated."""
        own, whole = self.param, self.param.whole
        return cells(own.scheme, own.shape[1])[one.fills].columns == cells(form.kept, whole.shape[1])[one.fills].columns

    def _leaf_whole(self, one: DiskTensor, info: TensorInfo, sections: Sequence[int], *, ends: bool) -> LoadItem:
        rows = max((1, *info.shape[:1]))
        own = sum(self.param.section_rows[section] for section in sections)
        item = self._item(sections[0], info, (0, rows), (0, own), sections=len(sections))
        return replace(item, leaf=one.leaf, fills=one.fills, held=True, completes=ends)

    def _leaf_kept(
        self, one: DiskTensor, info: TensorInfo, form: DiskForm, sections: Sequence[int]
    ) -> Iterator[LoadItem]:
        """Rows that are kept byte for byte, as they are or this rank's columns of them."""
        packed, stride, columns = self._bytes_of(one, info, form)
        direct = self.filling.direct and columns is None and info.is_plain
        for section in sections:
            first, stop = self.param.rows_in_run(section)
            for start, end in runs_of_rows(info, (first, stop), item_nbytes=self.filling.item_nbytes):
                item = self._item(section, packed, (start, end), (start - first, end - first))
                yield replace(
                    item, leaf=one.leaf, fills=one.fills, direct=direct, columns=columns, stride_nbytes=stride
                )

    def _bytes_of(self, one: DiskTensor, info: TensorInfo, form: DiskForm) -> tuple[TensorInfo, int, Span | None]:
        """As `_in_columns`, in bytes of what is kept."""
        cut = self.param.cut
        assert cut is not None
        if cut.columns is None:
            return info, 0, None
        whole = self.param.whole
        cell = cells(form.kept, whole.shape[1])[one.fills].columns
        stored = form.kept.storage((1,), whole.shape[1], wide=whole.dtype)[one.fills]
        size = stored.dtype.itemsize
        if cell == 0:
            return info, 0, None
        info = replace(info, shape=(info.shape[0], info.numel // max(1, info.shape[0])))
        span = (cut.columns[0] // cell * size, -(-cut.columns[1] // cell) * size)
        if not _worth_alone(info, span, whole_rows=self.filling.whole_rows):
            return info, 0, span
        return _packed_bytes(info, span), info.row_nbytes, None

    def _leaf_held(
        self, one: DiskTensor, info: TensorInfo, sections: Sequence[int], *, ends: bool
    ) -> Iterator[LoadItem]:
        """Rows of what is cut, or quantized anew, once it is there: this rank's own, or all where a scale depends on
        more."""
        whole = self.param.whole
        for section in sections:
            first, stop = self.param.rows_in_run(section)
            if not whole.kept_as_stored and scale_scope(self.param, section) is not Scope.OWN:
                part = self.param.parts[section].section
                first = whole.offset_in_run(part)
                stop = first + whole.section_rows[part]
            own = self.param.section_rows[section]
            spans = list(runs_of_rows(info, (first, stop), item_nbytes=self.filling.item_nbytes))
            for index, (start, end) in enumerate(spans):
                last = index == len(spans) - 1
                item = self._item(section, info, (start, end), (0, own) if last else (0, 0))
                yield replace(
                    item, leaf=one.leaf, fills=one.fills, held=True, completes=ends and last and section == sections[-1]
                )


def columns_alone(info: TensorInfo, columns: Span, *, whole_rows: bool) -> TensorInfo | None:
    """What columns [first, stop) of a tensor make, packed, where they are runs of bytes that are worth reading alone;
    None where whole rows are read. `whole_rows`: so too where the gaps would be read along."""
    if info.strides is not None or info.rope_heads or len(info.shape) != 2:
        return None
    unit, size = (info.encoding.block_values, info.encoding.block_nbytes) if info.encoding else (1, info.dtype.itemsize)
    if columns[0] % unit or columns[1] % unit:
        return None
    span = (columns[0] // unit * size, columns[1] // unit * size)
    if not _worth_alone(info, span, whole_rows=whole_rows):
        return None
    return replace(_packed_bytes(info, span), shape=(info.shape[0], columns[1] - columns[0]))


def _worth_alone(info: TensorInfo, span: Span, *, whole_rows: bool) -> bool:
    run_nbytes = span[1] - span[0]
    skips = not whole_rows or skips_gaps(run_nbytes, info.row_nbytes)
    return skips and reads_columns(info.row_nbytes, run_nbytes)


def _packed_bytes(info: TensorInfo, span: Span) -> TensorInfo:
    """Bytes [first, stop) of each row, as if they lay one after the other."""
    width = span[1] - span[0]
    dtype = DType.U8 if width % info.dtype.itemsize else info.dtype  # words of codes may be cut, bytes are not
    shape = (info.shape[0], width // dtype.itemsize)
    return replace(info, dtype=dtype, shape=shape, offset=info.offset + span[0], nbytes=info.shape[0] * width)


def stretch(info: TensorInfo, rows: Span, columns: Span | None) -> TensorInfo:
    """Rows and columns of a tensor with strides, as one of its own: of the bytes from its first number to its last."""
    assert info.strides is not None
    size, spans = info.dtype.itemsize, (rows,) if columns is None else (rows, columns)
    first = sum(span[0] * step for span, step in zip(spans, info.strides, strict=True))
    shape = tuple(span[1] - span[0] for span in spans)
    numbers = 1 + sum((count - 1) * step for count, step in zip(shape, info.strides, strict=True))
    nbytes = max(0, numbers * size) if min(shape) else 0
    return replace(info, shape=shape, offset=info.offset + first * size, nbytes=nbytes)


def _interleaved(info: TensorInfo, spans: Sequence[Span]) -> TensorInfo | None:
    """The rows of a gate and an up that take turns, where the same ones of both are wanted: they lie together."""
    if info.rope_heads != 1 or info.strides is not None or len(spans) != 2:
        return None
    (first, stop), (second, end) = spans
    half = info.shape[0] // 2
    if (second - half, end - half) != (first, stop):
        return None
    row = info.row_nbytes
    shape = (2 * (stop - first), *info.shape[1:])
    return replace(info, shape=shape, offset=info.offset + 2 * first * row, nbytes=shape[0] * row)

"""Storing parts of weights that are cut over ranks: what is kept equals, to the bit, the part of the whole's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from layers.cuts import scale_scope
from layers.weights import ParamSpec
from quant.cuts import cut_stored, put_parts
from quant.disk_forms.form import same_bytes
from quant.dtypes import to_torch
from quant.requantize import requantize, wide_rows
from quant.scheme import Scheme, empty_stored
from quant.shared_scales import Scope, SectionCut, local_maxima, quantize_part, quantize_whole
from streaming.load_plan import LoadItem
from streaming.stages import item_views

Maximum = Callable[[torch.Tensor], torch.Tensor]
"""The elementwise maximum over the ranks that share a layer; entered by all of them in plan order."""
Stored = Mapping[str, torch.Tensor]


def store_part(item: LoadItem, wide: torch.Tensor, stored: Stored, *, maximum: Maximum) -> None:
    """Quantize the wide numbers of an item of a cut parameter into their place, section by section; scales that other
    ranks have a part in are agreed with them, or made of the whole section, where that is what `wide` is."""
    for part, numbers in _sections(item, wide):
        views = item_views(part, stored)
        scope = scale_scope(item.param, part.section)
        cut, whole, own = _cut_of_run(part), item.param.whole.scheme, item.param.scheme
        numbers = numbers.contiguous()
        if scope is Scope.WHOLE:
            quantize_whole(whole, own, numbers, cut, views)
        else:
            maxima = maximum(local_maxima(whole, numbers, cut)) if scope is Scope.MAXIMA else None
            quantize_part(whole, own, numbers, maxima, cut, views)


def _sections(item: LoadItem, wide: torch.Tensor) -> Iterator[tuple[LoadItem, torch.Tensor]]:
    """The item's sections, each with its numbers."""
    if item.sections == 1:
        yield item, wide
        return
    first = 0
    for at, section in enumerate(range(item.section, item.section + item.sections)):
        rows = item.param.section_rows[section]
        part = replace(item, section=section, sections=1, section_rows=(0, rows), picked=())
        if item.scales_of_all:
            numbers = wide[slice(*item.picked[at])]
            whole = scale_scope(item.param, section) is Scope.WHOLE
            yield part, numbers if whole or item.columns is None else numbers[:, slice(*item.columns)]
        else:
            yield part, wide[first : first + rows]
        first += rows


def _cut_of_run(item: LoadItem) -> SectionCut:
    """How the rows of an item are cut: those of a run of rows as if they were a section, which is cut by columns, or
    not at all, for no scale reaches over its edges."""
    assert item.param.cut is not None
    cut = item.param.cut.section_cut(item.section)
    if item.param.cut.columns is None and scale_scope(item.param, item.section) is not Scope.OWN:
        return cut
    rows = item.section_rows[1] - item.section_rows[0]
    return replace(cut, total_rows=rows, rows=(0, rows), row_edges=())


def _empty(param: ParamSpec, kept: Scheme, run: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Memory for a whole run of sections in the form on disk."""
    whole = param.whole
    return empty_stored(kept.storage((whole.run_rows[run],), whole.shape[1], wide=whole.dtype), device=device)


class CutArrivals:
    """What has come of a run of sections in its form on disk, until this rank's part of it can be made: one run at a
    time, for items come in plan order. Memory that no row is written to is never touched."""

    def __init__(self) -> None:
        self._key: tuple[str, int] | None = None
        self._held: dict[str, torch.Tensor] = {}

    def store(self, item: LoadItem, wide: torch.Tensor, stored: Stored) -> None:
        """Hold one tensor of the form on disk; with the last one of a stored tensor, or of the run, store the part."""
        param, run = item.param, item.disk_run
        if self._key != (param.name, run):
            self._held = {}  # before there is another
            self._key, self._held = (param.name, run), _empty(param, item.form.kept, run, wide.device)
        if item.is_as_stored:
            place = self._held[item.fills][slice(*item.rows)]
            place.copy_(same_bytes(wide, place))
        else:
            item.form.place(item.leaf, wide, self._held)
        if not item.completes:
            return
        if param.whole.kept_as_stored:
            self._cut(item, stored)
            return
        for section in _of_run(param, run):
            self._quantize(item, section, stored)
        self._key, self._held = None, {}

    def _cut(self, item: LoadItem, stored: Stored) -> None:
        param, run = item.param, item.disk_run
        assert param.cut is not None
        for section in _of_run(param, run):
            views = param.scheme.section_views(stored, param.section_rows, section)
            found = cut_stored(
                item.form.kept, {item.fills: self._held[item.fills]}, param.scheme, rows=param.rows_in_run(section),
                columns=param.cut.columns, total_rows=param.whole.run_rows[run], in_features=param.whole.shape[1],
            )  # fmt: skip
            put_parts(found, views)

    def _quantize(self, item: LoadItem, section: int, stored: Stored) -> None:
        param, run = item.param, item.disk_run
        assert param.cut is not None
        whole, dtype = param.whole, to_torch(param.dtype)
        views = param.scheme.section_views(stored, param.section_rows, section)
        first, stop = param.rows_in_run(section)
        total, width, kept = whole.run_rows[run], whole.shape[1], item.form.kept
        if scale_scope(param, section) is not Scope.OWN:
            begin = first - param.parts[section].start
            rows = (begin, begin + whole.section_rows[param.parts[section].section])
            numbers = wide_rows(kept, self._held, rows, total=total, in_features=width, dtype=dtype)
            quantize_whole(whole.scheme, param.scheme, numbers, param.cut.section_cut(section), views)
        elif param.cut.columns is None and param.scheme == whole.scheme:
            requantize(
                kept, self._held, param.scheme, views,
                first=first, rows=stop - first, total=total, in_features=width, dtype=dtype,
            )  # fmt: skip
        else:
            numbers = wide_rows(kept, self._held, (first, stop), total=total, in_features=width, dtype=dtype)
            own = numbers[:, slice(*param.cut.column_range)].contiguous()
            quantize_part(whole.scheme, param.scheme, own, None, param.cut.section_cut(section), views)


def _of_run(param: ParamSpec, run: int) -> list[int]:
    """This rank's sections that are of one run of the uncut parameter."""
    return [section for section in range(len(param.sections)) if param.run_of(section) == run]

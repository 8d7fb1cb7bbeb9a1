"""Quantizing a part of a weight so that its stored numbers are, to the bit, those of the whole weight's part.

Where a scale's cell lies on several ranks, they agree on its largest magnitude (quant.cell_maxima), and each quantizes
its part beside a *witness* of it: in an extended copy of the part that begins and ends with whole cells, where the
missing numbers are zeros, but for one that is the agreed maximum. A scheme makes the same scale of that as of the whole
cell, so no codec knows of cuts. What was added is left out again. Where a maximum is that of whole rows, or of all, the
codes are made under it at once, without a copy.

r rows of the part, I its columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.cell_maxima import MaximaLayout, local_maxima
from quant.cells import SECTION, cells
from quant.cuts import cut_stored, put_parts
from quant.dtypes import DType
from quant.errors import QuantError
from quant.float8 import Fp8PerChannel, Fp8PerTensor
from quant.int8 import Int8PerChannel
from quant.scheme import Scheme, empty_stored
from quant.section_cuts import Scope, SectionCut, runs, runs_from, scope_of

if TYPE_CHECKING:
    import torch

    from quant.row_codec import RowCodec

__all__ = ["Scope", "SectionCut", "local_maxima", "quantize_part", "quantize_whole", "runs", "scope_of"]

STRIP_NBYTES = 4 << 20  # of a part's rows in float32, beside which about the same is held once more
_WITNESSES = 2  # columns before a part whose rows have one scale each: even, for two codes may share a byte


def quantize_part(
    scheme: Scheme,
    part_scheme: Scheme,
    part: torch.Tensor,
    maxima: torch.Tensor | None,
    cut: SectionCut,
    out: Mapping[str, torch.Tensor],
    *,
    first: int = 0,
) -> None:
    """Fill `out`, the views of rows [first, first + r) of the part (which begin a run of `runs`) in its own scheme (of
    `quant.cuts.cut_scheme`), from their wide numbers [r, I]: as `scheme` makes them of the whole section.

    `maxima` are those that the ranks agree on; None where the scope is OWN. QuantError for other scopes.
    """
    scope = scope_of(scheme, cut)
    if scope is Scope.WHOLE or (scope is Scope.MAXIMA) is not (maxima is not None):
        raise QuantError(f"{scheme.name}: a part of a cut whose scope is {scope.value!r} cannot be quantized so")
    if maxima is None and part_scheme == scheme:
        scheme.quantize_into(part, out)
        return
    layout = MaximaLayout.of(scheme, cut)
    known = None if maxima is None else layout.views(maxima.to(part.device))
    begin = cut.rows[0] + first
    codec = _row_codec(scheme)
    if codec is not None and known is not None:
        magnitudes = _of_rows(known, layout, begin, begin + part.shape[0])
        codec.quantize_under(part, out=out["weight"], scale=out["weight_scale"], magnitudes=magnitudes)
        return
    most = max(1, STRIP_NBYTES // (4 * max(1, part.shape[1])))
    for start, stop in runs_from((begin, begin + part.shape[0]), layout.cell.rows or 1, most):
        extended = _Extended.of(part[start:stop], (begin + start, cut.columns[0]), cut, layout)
        if known is not None:
            extended.add_witnesses(*known)
        _store(scheme, part_scheme, extended, _rows_of(out, part_scheme, start, stop))


def quantize_whole(
    scheme: Scheme, part_scheme: Scheme, wide: torch.Tensor, cut: SectionCut, out: Mapping[str, torch.Tensor]
) -> None:
    """Fill `out`, the views of the part, from the whole section's wide numbers: for the scope WHOLE. All that is stored
    of the section is held for the moment."""
    stored = _quantized(scheme, wide)
    put_parts(cut_stored(
        scheme, stored, part_scheme,
        rows=cut.rows, columns=cut.columns, total_rows=cut.total_rows, in_features=cut.in_features,
    ), out)  # fmt: skip


def _row_codec(scheme: Scheme) -> RowCodec | None:
    """What codes 8-bit numbers with a scale for each row, or one for all."""
    from quant.float8_codec import FLOAT8
    from quant.int8_codec import INT8

    if isinstance(scheme, Int8PerChannel):
        return INT8
    return FLOAT8 if isinstance(scheme, Fp8PerTensor | Fp8PerChannel) else None


def _of_rows(
    known: tuple[torch.Tensor, torch.Tensor, torch.Tensor], layout: MaximaLayout, start: int, stop: int
) -> torch.Tensor:
    """float32 magnitudes: [stop - start] of whole rows, [1] of a whole section."""
    import torch

    rows, columns, _ = known
    found = (rows if rows.numel() else columns).flatten()
    return found.view(torch.float32)[slice(0, 1) if layout.cell == SECTION else slice(start, stop)]


@dataclass(frozen=True)
class _Extended:
    """Rows of a part with margins, so that they begin and end with whole cells of the section; zeros there, and rows
    behind them for a section's scale. `at`: the first row's and column's place in the section."""

    wide: torch.Tensor  # float32
    rows: tuple[int, int]  # those of the part
    columns: tuple[int, int]
    at: tuple[int, int]
    layout: MaximaLayout

    @classmethod
    def of(cls, part: torch.Tensor, at: tuple[int, int], cut: SectionCut, layout: MaximaLayout) -> _Extended:
        import torch

        height, width = part.shape
        top, bottom = _margins(at[0], height, layout.cell.rows, cut.total_rows)
        left, right = _margins(at[1], width, layout.cell.columns, cut.in_features)
        if layout.cell.columns == 0 and layout.cut_columns:
            left = _WITNESSES
        wide = torch.zeros(top + height + bottom + layout.has_section, left + width + right, device=part.device)
        wide[top : top + height, left : left + width] = part
        return cls(wide, (top, top + height), (left, left + width), at, layout)

    def add_witnesses(self, rows: torch.Tensor, columns: torch.Tensor, section: torch.Tensor) -> None:
        """Put the agreed maxima, as `MaximaLayout.views` gives them, where numbers are missing."""
        import torch

        rows, columns, section = (one.view(torch.float32) for one in (rows, columns, section))
        if self.layout.has_section:
            self.wide[-1, :1] = section
        self._add_rows(rows)
        self._add_columns(columns)

    def _add_rows(self, maxima: torch.Tensor) -> None:
        cell, height = self.layout.cell, self.wide.shape[0]
        for index, number in enumerate(self.layout.cut_rows):
            for row in _missing(number, cell.rows, self.at[0], self.rows, height)[:1]:
                witnesses = self.wide[row, :: cell.columns]
                first = self.at[1] // cell.columns
                witnesses.copy_(maxima[0, index, first : first + witnesses.shape[0]])

    def _add_columns(self, maxima: torch.Tensor) -> None:
        cell = self.layout.cell
        for index, number in enumerate(self.layout.cut_columns):
            places = _missing(number, cell.columns, self.at[1], self.columns, self.wide.shape[1])
            if not places:
                continue
            rows = slice(0, self.wide.shape[0] - self.layout.has_section, cell.rows)
            first = self.at[0] // cell.rows
            count = len(range(*rows.indices(self.wide.shape[0])))
            known = maxima[:, first : first + count, index]
            if self.layout.signs == 1:
                self.wide[rows, places[0]] = known[0]
            elif len(places) > 1:
                self.wide[rows, places[0]], self.wide[rows, places[1]] = known[0], -known[1]
            else:
                self._add_either(known[0], -known[1], number, places[0])

    def _add_either(self, high: torch.Tensor, low: torch.Tensor, number: int, place: int) -> None:
        """One number is missing of a group: the largest, if that is not here, or else perhaps the smallest."""
        import torch

        size = self.layout.cell.columns
        start = number * size - (self.at[1] - self.columns[0])
        here = self.wide[:, max(0, start) : start + size].amax(1).clamp_(min=0)
        self.wide[:, place] = torch.where(high == here, low, high)


def _margins(first: int, count: int, size: int, total: int) -> tuple[int, int]:
    """What is missing before and behind to whole cells, the last of which may be short."""
    if size < 2:
        return 0, 0
    stop = first + count
    return first % size, min(-(-stop // size) * size, total) - stop


def _missing(number: int, size: int, first: int, own: tuple[int, int], count: int) -> list[int]:
    """Where the rows (or columns) of that cell lie in the margins of `count`, `own` of which are the part's, from
    `first` of the section on."""
    begin = first - own[0]
    start, stop = (0, count) if size == 0 else (max(0, number * size - begin), min(count, (number + 1) * size - begin))
    return [place for place in range(start, stop) if not own[0] <= place < own[1]]


def _store(scheme: Scheme, part_scheme: Scheme, extended: _Extended, out: Mapping[str, torch.Tensor]) -> None:
    stored = _quantized(scheme, extended.wide)
    height, width = extended.wide.shape
    put_parts(cut_stored(
        scheme, stored, part_scheme,
        rows=extended.rows, columns=extended.columns, total_rows=height, in_features=width,
    ), out)  # fmt: skip


def _quantized(scheme: Scheme, wide: torch.Tensor) -> dict[str, torch.Tensor]:
    stored = empty_stored(scheme.storage((wide.shape[0],), wide.shape[1], wide=DType.F32), device=wide.device)
    scheme.quantize_into(wide, stored)
    return stored


def _rows_of(stored: Mapping[str, torch.Tensor], scheme: Scheme, start: int, stop: int) -> dict[str, torch.Tensor]:
    """The views of rows [start, stop) of what is stored for rows of a section."""
    sizes = {name: cell.rows for name, cell in cells(scheme, 0).items()}
    return {
        name: tensor[start // sizes[name] : -(-stop // sizes[name])] if sizes[name] else tensor
        for name, tensor in stored.items()
    }

"""How a section of a weight is cut over ranks, and whether scales are of numbers that lie on several of them.

A scale is made from the numbers of its cell: a group, a block, a row, a section. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from quant.cells import Cell, cells
from quant.errors import QuantError
from quant.int4 import ORDER, IntPerGroup
from quant.percentile import takes_percentile
from quant.scheme import Scheme


class Scope(Enum):
    """What a part needs to know of the rest to be quantized."""

    OWN = "own"  # nothing: no scale's cell is cut
    MAXIMA = "maxima"  # the largest magnitudes of the cells that are cut
    WHOLE = "whole"  # every number: the section is quantized whole, and then cut


@dataclass(frozen=True)
class SectionCut:
    """How a section of `total_rows` x `in_features` is cut. A rank has rows [first, stop) and columns [first, stop);
    the edges are where any rank's part begins or ends (the ends of the section count for nothing): every rank of the
    cut must have the same."""

    total_rows: int
    in_features: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    row_edges: tuple[int, ...] = ()
    column_edges: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, own, edges, size in (
            ("rows", self.rows, self.row_edges, self.total_rows),
            ("columns", self.columns, self.column_edges, self.in_features),
        ):
            missing = set(own) - {0, size, *edges}
            if missing or not 0 <= own[0] <= own[1] <= size:
                raise QuantError(
                    f"{name} {own[0]} to {own[1]} of {size}, cut at {', '.join(map(str, edges)) or 'none'}"
                )

    @cached_property
    def inner_edges(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The edges of rows and of columns that lie within the section, in order."""
        return (
            tuple(sorted({edge for edge in self.row_edges if 0 < edge < self.total_rows})),
            tuple(sorted({edge for edge in self.column_edges if 0 < edge < self.in_features})),
        )


def scope_of(scheme: Scheme, cut: SectionCut) -> Scope:
    """What a part of such a cut needs to know of the rest to be quantized by `scheme`; the same on all its ranks."""
    row_edges, column_edges = cut.inner_edges
    crossed = any(
        any(_crosses(edge, cell.rows) for edge in row_edges)
        or any(_crosses(edge, cell.columns) for edge in column_edges)
        for name, cell in cells(scheme, cut.in_features).items()
        if name not in ("weight", ORDER)
    )
    if not crossed:
        return Scope.OWN
    if takes_percentile(scheme) and getattr(scheme, "percentile", None) is not None:
        return Scope.WHOLE
    if isinstance(scheme, IntPerGroup) and (scheme.ordered or (scheme.bits == 4 and scheme.group_size % 2)):
        return Scope.WHOLE
    return Scope.MAXIMA


def _crosses(edge: int, size: int) -> bool:
    return size == 0 or edge % size != 0


def runs(scheme: Scheme, cut: SectionCut, *, most: int) -> list[tuple[int, int]]:
    """Runs of the part's rows, counted from its first, of about `most` rows each: `quantize_part` takes each by itself.

    Blocks, which count from the section's first row, are not divided; one run where a scale spans the section and
    none is agreed on.
    """
    multiple = scale_cell(scheme, cut).rows or 1 if scope_of(scheme, cut) is Scope.MAXIMA else scheme.row_multiple
    return runs_from(cut.rows, multiple, most) if multiple else [(0, cut.rows[1] - cut.rows[0])]


def runs_from(rows: tuple[int, int], multiple: int, most: int) -> list[tuple[int, int]]:
    """Runs of rows [first, stop), counted from the first, which begin at multiples; one, where there are no rows."""
    first, stop = rows
    step = max(multiple, most // multiple * multiple)
    starts = [first, *range(first // multiple * multiple + step, stop, step)]
    return [(start - first, end - first) for start, end in zip(starts, [*starts[1:], stop], strict=True)]


def scale_cell(scheme: Scheme, cut: SectionCut) -> Cell:
    """The cell of a scale of the section: of the finest, where there are two kinds."""
    return cells(scheme, cut.in_features).get("weight_scale", Cell(1, 1))

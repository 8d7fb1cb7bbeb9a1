"""The largest magnitudes of the cells that a cut goes through: what a rank knows of them, for ranks to agree on.

Maxima are the bits of float32 magnitudes, as int32: these are ordered as the magnitudes are, with NaN above infinity,
so that a reduction cannot lose one. Where codes have a zero point there are two of each cell: of the numbers above
zero, and of those below. R rows of the part, I its columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.cells import Cell
from quant.int4 import IntPerGroup
from quant.microscaling import NvFp4
from quant.scheme import Scheme
from quant.section_cuts import SectionCut, scale_cell

if TYPE_CHECKING:
    import torch

    from quant.panels import Workspace


@dataclass(frozen=True)
class MaximaLayout:
    """How the maxima of a cut lie in one vector: `signs` times those of the rows of cells that are cut, then those of
    the columns of cells that are cut, and the section's own where it has a scale besides."""

    cell: Cell
    grid: tuple[int, int]  # cells of the section
    cut_rows: tuple[int, ...]  # of cells, which some edge goes through
    cut_columns: tuple[int, ...]
    signs: int  # 2: of numbers above zero and of those below
    has_section: bool

    @classmethod
    def of(cls, scheme: Scheme, cut: SectionCut) -> MaximaLayout:
        """The layout of all ranks of the cut."""
        cell = scale_cell(scheme, cut)
        row_edges, column_edges = cut.inner_edges
        sizes = cell.rows or max(1, cut.total_rows), cell.columns or max(1, cut.in_features)
        return cls(
            cell,
            (-(-cut.total_rows // sizes[0]), -(-cut.in_features // sizes[1])),
            _cut_cells(row_edges, sizes[0]),
            _cut_cells(column_edges, sizes[1]),
            2 if isinstance(scheme, IntPerGroup) and not scheme.symmetric else 1,
            isinstance(scheme, NvFp4),
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of each of the three."""
        rows, columns = len(self.cut_rows) * self.grid[1], self.grid[0] * len(self.cut_columns)
        return self.signs * rows, self.signs * columns, int(self.has_section)

    def views(self, maxima: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[signs, cut rows, columns of cells], [signs, rows of cells, cut columns], [1] or [0] of the vector."""
        rows, columns, section = maxima.split(self.sizes)
        return (
            rows.view(self.signs, len(self.cut_rows), self.grid[1]),
            columns.view(self.signs, self.grid[0], len(self.cut_columns)),
            section,
        )


def _cut_cells(edges: tuple[int, ...], size: int) -> tuple[int, ...]:
    return tuple(sorted({edge // size for edge in edges if edge % size}))


def local_maxima(scheme: Scheme, part: torch.Tensor, cut: SectionCut, *, first: int = 0) -> torch.Tensor:
    """What this rank knows of the cells that are cut: int32 [n], with the same n on all ranks, which agree on it by
    their elementwise maximum. `part`: rows [first, first + r) of the rank's part, wide [r, I]; of several such runs
    the maxima are joined in the same way."""
    import torch

    from quant.magnitudes import strips
    from quant.panels import Workspace

    layout = MaximaLayout.of(scheme, cut)
    maxima = torch.zeros(sum(layout.sizes), dtype=torch.int32, device=part.device)
    if part.numel() and maxima.numel():
        workspace = Workspace()
        for start, stop in strips(part):
            at = cut.rows[0] + first + start, cut.columns[0]
            for sign in range(layout.signs):
                numbers = part[start:stop] if layout.signs == 1 else _of_sign(part[start:stop], sign)
                _gather(numbers, at, layout, sign, maxima, workspace)
    return maxima


def _of_sign(numbers: torch.Tensor, sign: int) -> torch.Tensor:
    """Those above zero (sign 0) or below it (1), zeros for the rest; NaN stays."""
    wide = numbers if numbers.element_size() > 1 else numbers.float()  # 8 bits are not known to every operator
    return wide.clamp(min=0) if sign == 0 else wide.clamp(max=0)


def _gather(
    numbers: torch.Tensor,
    at: tuple[int, int],
    layout: MaximaLayout,
    sign: int,
    maxima: torch.Tensor,
    workspace: Workspace,
) -> None:
    """Put what rows and columns from `at` on have into their places."""
    import torch

    from quant.magnitudes import magnitude_bits, magnitudes_of

    bits = magnitude_bits(numbers, workspace)

    def lift(target: torch.Tensor, found: torch.Tensor) -> None:
        target.copy_(target.maximum(magnitudes_of(found, numbers.dtype).view(torch.int32)))

    rows, columns, section = layout.views(maxima)
    if layout.has_section:
        lift(section, bits.amax().view(1))
    for index, number in enumerate(layout.cut_rows):
        within = _within(number, layout.cell.rows, at[0], bits.shape[0])
        if within is not None:
            found, first = _pooled(bits[within].amax(0), layout.cell.columns, at[1])
            lift(rows[sign, index, first : first + found.shape[0]], found)
    for index, number in enumerate(layout.cut_columns):
        within = _within(number, layout.cell.columns, at[1], bits.shape[1])
        if within is not None:
            found, first = _pooled(bits[:, within].amax(1), layout.cell.rows, at[0])
            lift(columns[sign, first : first + found.shape[0], index], found)


def _within(number: int, size: int, first: int, count: int) -> slice | None:
    """Which of `count` rows (or columns) from `first` on lie in the cell of that number; None: none."""
    if size == 0:
        return slice(0, count)
    start, stop = max(0, number * size - first), min(count, (number + 1) * size - first)
    return slice(start, stop) if start < stop else None


def _pooled(values: torch.Tensor, size: int, first: int) -> tuple[torch.Tensor, int]:
    """The largest of each cell of values [n], the first of which is at `first`; and the first cell's number."""
    from torch.nn.functional import pad

    if size == 0:
        return values.amax(0, keepdim=True), 0
    before = first % size
    whole = pad(values, (before, -(before + values.shape[0]) % size)) if size > 1 else values
    return whole.view(-1, size).amax(1), first // size

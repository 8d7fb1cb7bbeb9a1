"""From one stored form to another by way of wide numbers, a strip of rows at a time. Imports torch when it works."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from quant.scheme import Scheme
from quant.sections import cut_rows

if TYPE_CHECKING:
    import torch

STRIP_NBYTES = 4 << 20  # of float32 numbers held beside the two forms, and the same of their scales


def requantize(
    source: Scheme,
    stored: Mapping[str, torch.Tensor],
    target: Scheme,
    out: Mapping[str, torch.Tensor],
    *,
    first: int,
    rows: int,
    total: int,
    in_features: int,
    dtype: torch.dtype,
) -> None:
    """Fill `out` (the views of one section of `rows` rows) from rows [first, first + rows) of what `source` has stored
    of a weight [total, in_features] of one section, dequantized to `dtype`.

    A scheme whose scale spans the section gets all of it at once: so much is held wide for the moment.
    """
    multiple = target.row_multiple
    step = rows if multiple == 0 else _strip_rows(in_features, multiple=multiple)
    for start in range(0, rows, max(1, step)):
        stop = min(rows, start + step)
        run = (first + start, first + stop)
        wide = wide_rows(source, stored, run, total=total, in_features=in_features, dtype=dtype)
        views = cut_rows(out, rows=rows, multiple=multiple, start=start, stop=stop) if step < rows else out
        target.quantize_into(wide, views)


def strips_nbytes(source: Scheme, target: Scheme, in_features: int) -> int:
    """The most that is held in strips where the new scheme takes runs of rows: wide ones, and the numbers and scales
    that they are dequantized from."""
    multiple = max(1, source.row_multiple, target.row_multiple)
    return 3 * 4 * in_features * _strip_rows(in_features, multiple=multiple)


def wide_rows(
    source: Scheme,
    stored: Mapping[str, torch.Tensor],
    run: tuple[int, int],
    *,
    total: int,
    in_features: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Rows [start, stop) of a weight [total, in_features] in `dtype`, dequantized in runs: in float32 no more than a
    strip is held, with its scales."""
    import torch

    (start, stop), block = run, source.row_multiple or 1
    wide = torch.empty(stop - start, in_features, dtype=dtype, device=stored["weight"].device)
    for begin in range(start // block * block, stop, _strip_rows(in_features, multiple=block)):
        end = min(total, begin + _strip_rows(in_features, multiple=block))
        part = cut_rows(stored, rows=total, multiple=source.row_multiple, start=begin, stop=end)
        numbers = source.dequantize(part, (end - begin,), dtype=dtype, in_features=in_features)
        first, last = max(start, begin), min(stop, end)
        wide[first - start : last - start] = numbers[first - begin : last - begin]
    return wide


def _strip_rows(in_features: int, *, multiple: int) -> int:
    """Rows of a strip: whole runs of `multiple`, one at the least."""
    return max(1, STRIP_NBYTES // (4 * max(1, in_features) * multiple)) * multiple

"""The division of a weight into panels and strips: by its shape alone. Imports no torch. [no-torch]

What the sizes decide is part of what defines a product's bits. Measured with examples/bench_kernels.py.
"""

from __future__ import annotations

from functools import lru_cache

PANELS = 16  # at most: enough for as many threads, few enough that handing them out costs little
LEAST_NBYTES = 1 << 19  # of a weight's panel: less is not worth a thread's while
LEAST_LIBRARY_NBYTES = 3 << 19  # the same where oneDNN is called, which takes 30 microseconds to begin
LEAST_TURNED_NBYTES = 3 << 20  # the same with the weight on the left
ROW_MULTIPLE = 32  # rows of a panel: whole tiles of the kernels
STRIP_NBYTES = 1 << 20  # of a strip's wide form: with what it is made from it stays in the second-level cache
LEAST_STRIP_ROWS = 32  # lower products are slow

Bounds = tuple[tuple[int, int], ...]


@lru_cache(maxsize=1024)
def panel_bounds(
    rows: int, row_nbytes: int, *, multiple: int = ROW_MULTIPLE, least_nbytes: int = LEAST_NBYTES
) -> Bounds:
    """The fixed runs of output rows [start, stop) of a weight, `row_nbytes` a row.

    Their number is a power of two, so that two or four threads get equal shares.
    """
    count = 1 << min(PANELS, max(1, rows * row_nbytes // least_nbytes)).bit_length() - 1
    return _runs(0, rows, _rounded_up(-(-rows // count), multiple))


@lru_cache(maxsize=4096)
def strip_bounds(start: int, stop: int, *, row_nbytes: int) -> Bounds:
    """Runs of a panel's rows whose wide form, `row_nbytes` a row, fits the strip buffer.

    Of a power of two rows: so where panels begin at a scale block, a strip has whole blocks or lies within one.
    """
    fitting = max(LEAST_STRIP_ROWS, STRIP_NBYTES // max(1, row_nbytes))
    return _runs(start, stop, 1 << fitting.bit_length() - 1)


def _rounded_up(rows: int, multiple: int) -> int:
    return max(multiple, -(-rows // multiple) * multiple)


def _runs(start: int, stop: int, size: int) -> Bounds:
    return tuple((row, min(stop, row + size)) for row in range(start, stop, size))

"""How an item's bytes are cut into pieces, each read at once, and what is read for them. [no-torch]"""

from __future__ import annotations

from collections.abc import Iterator

from streaming.column_reads import skips_gaps, span_nbytes

PIECE_NBYTES = 8 << 20  # one read call: short enough to end soon when the load is cancelled
STRETCH_NBYTES = 32 << 20  # of the file that a strided piece lies in, for the same reason
ALONE_NBYTES = 1 << 20  # a longer run, or one with a longer gap behind it, is a piece by itself


def cut_pieces(nbytes: int, run_nbytes: int, stride_nbytes: int) -> Iterator[tuple[int, int, int, int]]:
    """(where it begins behind the item's first byte on disk, bytes of the item before it, its bytes, its stride) of
    each piece of an item; the stride is 0 where the piece is one run."""
    if not run_nbytes or run_nbytes == stride_nbytes:
        yield from ((start, start, min(PIECE_NBYTES, nbytes - start), 0) for start in range(0, nbytes, PIECE_NBYTES))
        return
    count = nbytes // run_nbytes
    if run_nbytes >= min(ALONE_NBYTES, PIECE_NBYTES) or stride_nbytes - run_nbytes >= ALONE_NBYTES:
        for row in range(count):
            for start, before, size, _ in cut_pieces(run_nbytes, 0, 0):
                yield row * stride_nbytes + start, row * run_nbytes + before, size, 0
        return
    step = max(1, min(PIECE_NBYTES // run_nbytes, STRETCH_NBYTES // stride_nbytes))
    for row in range(0, count, step):
        rows = min(step, count - row)
        yield row * stride_nbytes, row * run_nbytes, rows * run_nbytes, stride_nbytes if rows > 1 else 0


def moved_nbytes(nbytes: int, run_nbytes: int, stride_nbytes: int) -> int:
    """Bytes that are read of the file for a piece: with its gaps, where these are read along."""
    if not run_nbytes or skips_gaps(run_nbytes, stride_nbytes):
        return nbytes
    return span_nbytes(nbytes, run_nbytes, stride_nbytes)

"""When a rank's columns of a row-major matrix are read as such, and when the bytes between them are read along.

A rank that has some columns of a matrix wants one *run* of bytes from each row; the next begins a *stride* behind it.
Pure, and it needs nothing but the standard library. [no-torch]
"""

from __future__ import annotations

LEAST_ROW_NBYTES = 256
LEAST_GAP_NBYTES = 12 << 10


def reads_columns(row_nbytes: int, run_nbytes: int) -> bool:
    """Whether a reader should hand over only this run of every row (a strided item), rather than whole rows of which
    a later stage takes its part.

    From rows of 256 bytes on, at every share of them: what is cut out goes from the reader's buffer to its place in
    one gathering write for many runs, so the bytes that nobody wants are never written. Below, each run costs more
    than the bytes that it spares. 256 MiB of a file, milliseconds, medians of 3 to 7 interleaved rounds, 2 cores,
    2 threads, Python 3.11, into shared memory; "cut" reads whole rows and writes the runs, "skip" reads the runs alone
    (after a hint of all of a piece's runs), "cold" is from a disk, "capped" from one held at 500 MB/s:

    row     run     warm: whole  cut  skip   cold: whole  cut  skip   capped: whole  cut  skip
    128     32            130    231
    256     64            201    166
    512     64             93     55
    1 KiB   512            83     55   574
    4 KiB   2 KiB          91     50   178         192    170   251
    4 KiB   512 B          97     29   173         214    183   240
    8 KiB   4 KiB                                  193    189   324           460    431   343
    8 KiB   1 KiB                                  193    165   345           488    486   338
    16 KiB  8 KiB         103     55    68         203    196   211           492    458   228
    16 KiB  4 KiB         106     41    59         195    221   180
    16 KiB  2 KiB          98     35    59         191    191   160           471    471   166
    32 KiB  16 KiB         91     52    54         190    213   146           492    451   242
    32 KiB  8 KiB         105     41    38         187    223   116
    32 KiB  4 KiB          98     33    31         197    189    81           467    478    82
    64 KiB  32 KiB         97     52    49         182    186   114           489    484   270
    64 KiB  16 KiB         82     33    26         203    209    85
    64 KiB  8 KiB          86     29    17         205    215    58           485    486    47
    """
    return run_nbytes < row_nbytes >= LEAST_ROW_NBYTES


def skips_gaps(run_nbytes: int, stride_nbytes: int) -> bool:
    """Whether a reader leaves out what lies between two runs: from 12 KiB on (the table of `reads_columns`), where that
    is faster from a disk, and three times as fast where bandwidth is scarce.

    Shorter gaps are read along. That costs a disk that nobody else reads from some time, and none where the other
    ranks of the same machine want those bytes anyway and find them in the page cache.
    """
    return stride_nbytes - run_nbytes >= LEAST_GAP_NBYTES


def span_nbytes(nbytes: int, run_nbytes: int, stride_nbytes: int) -> int:
    """Bytes of the file from the first of the runs' bytes to behind the last; `nbytes` where it is one run (0, 0)."""
    return nbytes if not run_nbytes else (nbytes // run_nbytes - 1) * stride_nbytes + run_nbytes

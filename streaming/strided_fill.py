"""Strided pieces: one run of bytes from each row of a matrix, packed one behind the other where they go.

Short gaps are read along, a stretch of whole rows at once; across long ones each run is read by itself, after the
system was told of all of them (see streaming.column_reads, which has the figures). It needs nothing but the standard
library. [no-torch]
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from streaming.column_reads import skips_gaps
from streaming.reading_records import SHORT, FlatPiece

MOST_VECTORS = 1024  # IOV_MAX of Linux: so many runs go into one call of the system


def runs_of(data: memoryview, piece: FlatPiece) -> list[memoryview]:
    """The piece's runs, of the bytes that lie in its file from its first on: as many as begin there."""
    run, stride = piece.run_nbytes, piece.stride_nbytes
    return [data[start : start + run] for start in range(0, len(data), stride)]


def cut_part(data: memoryview, start: int, piece: FlatPiece) -> tuple[int, list[memoryview]]:
    """What of `data`, which lies `start` bytes behind the piece's first in its file, belongs to runs; and how many
    packed bytes of the piece come before it."""
    run, stride, stop = piece.run_nbytes, piece.stride_nbytes, start + len(data)
    first = start // stride
    before = first * run + min(run, start - first * stride)
    parts = []
    for row in range(first, -(-stop // stride)):
        begin, end = max(start, row * stride), min(stop, row * stride + run)
        if begin < end:
            parts.append(data[begin - start : end - start])
    return before, parts


def write_runs(descriptor: int, runs: Sequence[memoryview], offset: int) -> None:
    """Write the runs one behind the other, from `offset` on."""
    for first in range(0, len(runs), MOST_VECTORS):
        group = runs[first : first + MOST_VECTORS]
        done, nbytes = os.pwritev(descriptor, group, offset), sum(map(len, group))
        if done < nbytes:
            _write_rest(descriptor, group, offset, done)
        offset += nbytes


def _write_rest(descriptor: int, runs: Sequence[memoryview], offset: int, done: int) -> None:
    """What a call that was cut short after `done` bytes left out."""
    for run in runs:
        while done < len(run):
            done += os.pwrite(descriptor, run[done:], offset + done)
        offset, done = offset + len(run), done - len(run)


def read_runs(descriptor: int, places: Sequence[memoryview], offset: int, stride_nbytes: int) -> int:
    """Read each run to its place by a call of its own: 0, or SHORT when the file ends before."""
    for index, place in enumerate(places):
        done = 0
        while done < len(place):
            got = os.preadv(descriptor, [place[done:]], offset + index * stride_nbytes + done)
            if got == 0:
                return SHORT
            done += got
    return 0


def fill_shared_runs(file: int, piece: FlatPiece, shared: int, buffer: memoryview) -> int:
    """Fill shared memory through its descriptor: 0, or SHORT when the file ends before."""
    skip = _skips(file, piece, len(buffer))
    run, stride = piece.run_nbytes, piece.stride_nbytes
    apart = run if skip else stride  # how far apart the runs lie in the buffer
    places = [buffer[start : start + run] for start in range(0, len(buffer) - run + 1, apart)]
    for first, count in _batches(piece, len(places)):
        offset, dest = piece.offset + first * stride, piece.dest + first * run
        if skip:
            code = read_runs(file, places[:count], offset, stride)
        else:
            code = read_runs(file, [buffer[: (count - 1) * stride + run]], offset, 0)
        if code:
            return code
        write_runs(shared, [buffer[: count * run]] if skip else places[:count], dest)
    return 0


def fill_memory_runs(file: int, piece: FlatPiece, memory: memoryview, scratch: memoryview) -> int:
    """Fill memory of this process: 0, or SHORT when the file ends before. Gaps that are read go into `scratch`."""
    skip = _skips(file, piece, len(scratch))
    run, stride = piece.run_nbytes, piece.stride_nbytes
    gap = scratch[: stride - run]
    for first, count in _batches(piece, MOST_VECTORS // 2):
        offset, dest = piece.offset + first * stride, piece.dest + first * run
        places = [memory[start : start + run] for start in range(dest, dest + count * run, run)]
        if not skip:
            woven = [vector for place in places for vector in (place, gap)][:-1]
            if os.preadv(file, woven, offset) == (count - 1) * stride + run:
                continue
        if code := read_runs(file, places, offset, stride):
            return code
    return 0


def _skips(file: int, piece: FlatPiece, buffer_nbytes: int) -> bool:
    """Whether the piece's gaps are left out; the system is told of the runs then."""
    run, stride = piece.run_nbytes, piece.stride_nbytes
    if not skips_gaps(run, stride) and stride <= buffer_nbytes:
        return False
    if hasattr(os, "posix_fadvise"):
        for index in range(piece.nbytes // run):
            os.posix_fadvise(file, piece.offset + index * stride, run, os.POSIX_FADV_WILLNEED)
    return True


def _batches(piece: FlatPiece, most: int) -> Iterator[tuple[int, int]]:
    """(first run, how many) of the piece, at most so many at once."""
    total = piece.nbytes // piece.run_nbytes
    for first in range(0, total, most):
        yield first, min(most, total - first)

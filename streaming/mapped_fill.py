"""The `lazy` strategy: bytes are taken from a map of their file, whose pages come as they are touched.

A run of the file is mapped for as long as it is copied, so nothing is held beyond it. Pieces of the region MAPPED are
not copied at all: whoever uses them maps their file (`streaming.kept_maps`). It needs nothing but the standard library.
[no-torch]
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from streaming.reading import SHORT, Fill, FlatPiece, put_own, put_shared

MAPPED = 2  # streaming.read_plan.Region.MAPPED


def fill_shared_from_map(shared: Sequence[int]) -> Fill:
    """Fills shared memory through its descriptor.

    The copy is a write from the map: where the file has shrunk meanwhile the system answers with an error, where an
    access by the program itself would end the process.
    """

    def fill(file: int, piece: FlatPiece) -> int:
        if piece.region == MAPPED:
            return 0
        with _mapped(file, piece.offset, piece.span_nbytes) as stretch:
            if stretch is None:
                return SHORT
            try:
                put_shared(stretch, piece, shared[piece.region])
            except OSError as error:
                if error.errno == errno.EFAULT:
                    return SHORT
                raise
        return 0

    return fill


def fill_memory_from_map(regions: Sequence[Any]) -> Fill:
    """Fills memory of this process. A file that shrinks within a copy ends the process."""

    def fill(file: int, piece: FlatPiece) -> int:
        if piece.region == MAPPED:
            return 0
        with _mapped(file, piece.offset, piece.span_nbytes) as stretch:
            if stretch is None:
                return SHORT
            put_own(stretch, piece, regions[piece.region])
        return 0

    return fill


@contextmanager
def _mapped(descriptor: int, offset: int, nbytes: int) -> Iterator[memoryview | None]:
    """A run of a file; None where the file ends before its end."""
    begin = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    if os.fstat(descriptor).st_size < offset + nbytes:
        yield None
        return
    try:
        found = mmap.mmap(descriptor, offset + nbytes - begin, prot=mmap.PROT_READ, offset=begin)
    except ValueError:  # it has shrunk since
        yield None
        return
    with found:
        whole = memoryview(found)
        run = whole[offset - begin :]
        try:
            yield run
        finally:
            run.release()
            whole.release()

"""Where each item's bytes land, and in which pieces they are read: layout as data, so that a reader needs no decisions.

Two regions of memory take bytes. *Final* memory holds direct items where they stay. The *window* is a ring that items
pass through on their way to being converted or quantized: they are placed one after the other, and an item may be
read once every older item that it overlaps has been released. Items are released in plan order, so that condition is
one number per item, known here. That is also why nothing can deadlock: the earliest item that is not loaded yet never
waits for memory that a later one holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from streaming.errors import BudgetError
from streaming.plan import LoadItem, LoadPlan

PIECE_NBYTES = 8 << 20  # one read call: short enough to end soon when the load is cancelled
ALIGNMENT = 64  # stored weights start at such addresses: kernels' bits can depend on it


class Region(IntEnum):
    """Which memory a piece is read into."""

    FINAL = 0
    WINDOW = 1


@dataclass(frozen=True)
class Piece:
    """One read: nbytes at file_offset of a file, to dest in a region, once `released` window items are released."""

    item: int
    file: int
    file_offset: int
    nbytes: int
    region: Region
    dest: int
    released: int


@dataclass(frozen=True)
class ReadPlan:
    """Everything a reader needs."""

    files: tuple[Path, ...]
    pieces: tuple[Piece, ...]
    final_nbytes: int
    window_nbytes: int
    final_offsets: Mapping[tuple[str, str], int]  # (parameter, stored name) -> offset in final memory
    window_offsets: Mapping[int, int]  # item -> offset in the window


def plan_reads(plan: LoadPlan, *, window_nbytes: int) -> ReadPlan:
    """Lay out both regions, cut every item into pieces. Raises BudgetError when an item is larger than the window."""
    if (largest := plan.largest_staged_nbytes) > window_nbytes:
        raise BudgetError(
            f"the window of {window_nbytes:,} bytes is smaller than the largest weight that passes through it "
            f"({largest:,} bytes): ask for --window {-(-largest >> 20)}MiB or more"
        )
    staged = [item for item in plan.items if not item.direct]
    slots = ring_slots([item.nbytes for item in staged], capacity=window_nbytes)
    window = {item.index: slot for item, slot in zip(staged, slots, strict=True)}
    final, final_nbytes = final_layout(plan)
    files: dict[Path, int] = {}
    pieces = []
    for item in plan.items:
        file = files.setdefault(item.tensor.file, len(files))
        dest, released = (_final_dest(item, final), 0) if item.direct else window[item.index]
        region = Region.FINAL if item.direct else Region.WINDOW
        for start in range(0, item.nbytes, PIECE_NBYTES):
            size = min(PIECE_NBYTES, item.nbytes - start)
            pieces.append(Piece(item.index, file, item.file_offset + start, size, region, dest + start, released))
    used = min(window_nbytes, sum(_aligned(item.nbytes) for item in staged))
    offsets = {index: slot[0] for index, slot in window.items()}
    return ReadPlan(tuple(files), tuple(pieces), final_nbytes, used, final, offsets)


def ring_slots(sizes: Sequence[int], *, capacity: int) -> list[tuple[int, int]]:
    """(offset, how many earlier items must have been released) of each item, placed one after the other in a ring."""
    live: deque[tuple[int, int, int]] = deque()  # (position in sizes, start, stop), oldest first
    slots, head, released = [], 0, 0
    for position, size in enumerate(sizes):
        start = head if head + size <= capacity else 0
        stop = start + size
        if start < head:  # wrapped: what lies behind the head is older than everything that is kept
            while live and live[0][1] >= head:
                released = live.popleft()[0] + 1
        while live and live[0][1] < stop and live[0][2] > start:
            released = live.popleft()[0] + 1
        live.append((position, start, stop))
        slots.append((start, released))
        head = _aligned(stop)
    return slots


def final_layout(plan: LoadPlan) -> tuple[dict[tuple[str, str], int], int]:
    """Offsets in final memory of every parameter that is filled by direct items alone, and the bytes they take."""
    offsets: dict[tuple[str, str], int] = {}
    end = 0
    for item in plan.items:
        name = item.param.name
        key = (name, name.rpartition(".")[2])
        if item.direct and key not in offsets:
            offsets[key] = end
            end = _aligned(end + item.param.nbytes)
    return offsets, end


def _final_dest(item: LoadItem, offsets: Mapping[tuple[str, str], int]) -> int:
    name = item.param.name
    row = sum(item.param.section_rows[: item.section]) + item.section_rows[0]
    return offsets[name, name.rpartition(".")[2]] + row * item.tensor.row_nbytes


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT

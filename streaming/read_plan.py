"""Where each item's bytes land, and in which pieces they are read: layout as data, so that a reader needs no decisions.

Two regions of memory take bytes. *Final* memory holds direct items where they stay. The *window* is a ring that items
pass through on their way to being converted or quantized: they are placed one after the other, and an item may be
read once every older item that it overlaps has been released. Items are released in plan order, so that condition is
one number per item, known here. That is also why nothing can deadlock: the earliest item that is not loaded yet never
waits for memory that a later one holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from streaming.errors import BudgetError
from streaming.file_runs import file_runs
from streaming.open_files import FileState
from streaming.piece_cutting import PIECE_NBYTES as PIECE_NBYTES
from streaming.piece_cutting import cut_pieces as cut_pieces
from streaming.piece_cutting import moved_nbytes
from streaming.plan import LoadItem, LoadPlan

if TYPE_CHECKING:
    from streaming.checkpoint.remote_file import WeightFile

ALIGNMENT = 64  # stored weights start at such addresses: kernels' bits can depend on it


class Region(IntEnum):
    """Which memory a piece is read into."""

    FINAL = 0
    WINDOW = 1
    MAPPED = 2  # none: the bytes stay in their file, which is mapped (see streaming.kept_maps)


class Piece(NamedTuple):  # there may be a hundred thousand: cheaper to make than a dataclass
    """One read: nbytes at file_offset of a file, to dest in a region, once `released` window items are released.

    A *strided* piece is `nbytes / run_nbytes` runs of run_nbytes each, the first at file_offset and each stride_nbytes
    behind the one before; they go to dest one after the other.
    """

    item: int
    file: int
    file_offset: int
    nbytes: int
    region: Region
    dest: int
    released: int
    run_nbytes: int = 0  # 0: one run
    stride_nbytes: int = 0

    @property
    def read_nbytes(self) -> int:
        """Bytes that are read of the file, short gaps between runs included."""
        return moved_nbytes(self.nbytes, self.run_nbytes, self.stride_nbytes)


@dataclass(frozen=True)
class ReadPlan:
    """Everything a reader needs."""

    files: tuple[WeightFile, ...]
    pieces: tuple[Piece, ...]
    final_nbytes: int
    window_nbytes: int
    final_offsets: Mapping[tuple[str, str], int]  # (parameter, stored name) -> offset in final memory
    window_offsets: Mapping[int, int]  # item -> offset in the window
    mapped: Mapping[tuple[str, str], tuple[int, int]] = field(default_factory=dict)  # what stays in its file, where
    states: tuple[FileState, ...] = ()  # of the files when they were planned; () where that is not known

    def state_of(self, file: WeightFile) -> FileState | None:
        """The file's state when it was planned; None where that is not known."""
        return dict(zip(self.files, self.states, strict=False)).get(file)


def plan_reads(plan: LoadPlan, *, window_nbytes: int, keep_maps: bool = False) -> ReadPlan:
    """Lay out both regions, cut every item into pieces. Raises BudgetError when an item is larger than the window.

    `keep_maps`: parameters whose bytes can be used where they lie in their file are left there.
    """
    if (largest := plan.largest_staged_nbytes) > window_nbytes:
        raise BudgetError(
            f"the window of {window_nbytes:,} bytes is smaller than the largest weight that passes through it "
            f"({largest:,} bytes): ask for --window {-(-largest >> 20)}MiB or more"
        )
    sizes = [(item, item.nbytes) for item in plan.items]
    staged = [(item, nbytes) for item, nbytes in sizes if item.is_staged]
    slots = ring_slots([nbytes for _, nbytes in staged], capacity=window_nbytes)
    window = {item.index: slot for (item, _), slot in zip(staged, slots, strict=True)}
    kept = views_of_files(plan) if keep_maps else {}
    final, final_nbytes = final_layout(plan, without=kept)
    files: dict[WeightFile, int] = {}
    pieces = []
    last, file = None, 0
    for item, nbytes in sizes:
        if item.tensor.file is not last:  # a path's hash is slow, and items come in the order of files
            last = item.tensor.file
            file = files.setdefault(last, len(files))
        if item.is_received:
            continue
        region = Region.FINAL if item.direct else Region.WINDOW
        if kept and item.direct and stored_key(item) in kept:
            region, dest, released = Region.MAPPED, 0, 0
        else:
            dest, released = (_final_dest(item, final), 0) if item.direct else window[item.index]
        if 0 < nbytes <= PIECE_NBYTES and not item.stride_nbytes:
            pieces.append(Piece(item.index, file, item.file_offset, nbytes, region, dest, released))
            continue
        for start, before, size, stride in cut_pieces(nbytes, item.run_nbytes, item.stride_nbytes):
            run = item.run_nbytes if stride else 0
            place, offset = dest + before, item.file_offset + start
            pieces.append(Piece(item.index, file, offset, size, region, place, released, run, stride))
    used = min(window_nbytes, sum(aligned(nbytes) for _, nbytes in staged))
    offsets = {index: slot[0] for index, slot in window.items()}
    mapped = {key: (files[file], offset) for key, (file, offset) in kept.items()}
    return ReadPlan(tuple(files), tuple(pieces), final_nbytes, used, final, offsets, mapped)


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
        head = aligned(stop)
    return slots


def final_layout(
    plan: LoadPlan, *, without: Collection[tuple[str, str]] = ()
) -> tuple[dict[tuple[str, str], int], int]:
    """Offsets in final memory of every stored tensor that is filled by direct items alone, and the bytes they take."""
    offsets: dict[tuple[str, str], int] = {}
    end = 0
    for item in plan.items:
        if item.direct and (key := stored_key(item)) not in offsets and key not in without:
            offsets[key] = end
            end = aligned(end + item.param.storage()[key[1]].nbytes)
    return offsets, end


def stored_key(item: LoadItem) -> tuple[str, str]:
    """(parameter, stored name) of the tensor that the item is part of."""
    return item.param.name, item.stored_name


def views_of_files(plan: LoadPlan) -> dict[tuple[str, str], tuple[Path, int]]:
    """Stored tensors that lie in a local file byte for byte as they are wanted, in one run that is aligned.

    Bits of products can depend on where a weight begins, so one that is not aligned is moved.
    """
    filling: dict[tuple[str, str], list[LoadItem]] = {}
    for item in plan.items:
        filling.setdefault(stored_key(item), []).append(item)
    runs = {key: file_runs(items) for key, items in filling.items()}
    return {key: found[0][:2] for key, found in runs.items() if len(found) == 1 and found[0].offset % ALIGNMENT == 0}


def _final_dest(item: LoadItem, offsets: Mapping[tuple[str, str], int]) -> int:
    row = item.param.section_starts[item.section] + item.section_rows[0]
    return offsets[stored_key(item)] + row * item.tensor.row_nbytes


def aligned(nbytes: int) -> int:
    """The next such address."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT

"""Plans of strided pieces of one file, and what reading them is to give: plain slices of its bytes."""

from __future__ import annotations

import select
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from streaming.checkpoint.remote_file import RemoteFile
from streaming.read_plan import Piece, ReadPlan, Region
from streaming.reader import Reader
from tests.streaming.waiting import SOON_S

NBYTES = 3_000_000
# (run, stride, runs, first byte): gaps that are read along, gaps that are left out, rows longer than any buffer
SHAPES = [
    (1, 300, 700, 7), (2, 256, 1500, 0), (64, 4096, 600, 4032), (4096, 8192, 300, 4096), (1000, 17_000, 170, 16_000),
    (300, 65_536, 40, 123), (16_384, 32_768, 80, 16_384), (50_000, 60_001, 45, 1), (70_000, 1_100_000, 3, 5),
    (900_000, 1_000_000, 2, 64),
]  # fmt: skip


def sliced(data: bytes, run: int, stride: int, runs: int, first: int) -> bytes:
    """The runs, one behind the other."""
    return b"".join(data[first + row * stride : first + row * stride + run] for row in range(runs))


def planned(files: Sequence[Path | RemoteFile], shapes: Sequence[tuple[int, int, int, int]] = SHAPES) -> ReadPlan:
    """A strided piece of each shape, by turns of both regions, and a plain one behind each of them."""
    pieces: list[Piece] = []
    ends = {Region.FINAL: 0, Region.WINDOW: 0}
    for number, (run, stride, runs, first) in enumerate(shapes):
        region = Region.WINDOW if number % 2 else Region.FINAL
        pieces.append(Piece(len(pieces), 0, first, run * runs, region, ends[region], 0, run, stride))
        ends[region] += run * runs
        pieces.append(Piece(len(pieces), 0, first + 10, 100, region, ends[region], 0))
        ends[region] += 100
    return ReadPlan(tuple(files), tuple(pieces), ends[Region.FINAL], ends[Region.WINDOW], {}, {})


def expected(plan: ReadPlan, data: bytes, region: Region) -> bytes:
    return b"".join(
        sliced(data, p.run_nbytes or p.nbytes, p.stride_nbytes, p.nbytes // (p.run_nbytes or p.nbytes), p.file_offset)
        for p in plan.pieces
        if p.region is region
    )


def errors(reader: Reader, count: int) -> dict[int, object]:
    """What each of the next completions says; waits for them."""
    found: dict[int, object] = {}
    while len(found) < count:
        assert select.select([reader.fileno()], [], [], SOON_S)[0]
        found |= {done.piece: done.error for done in reader.completions()}
    return found


def assert_reads(reader: Reader, plan: ReadPlan, data: bytes) -> None:
    with closing(reader):
        assert set(errors(reader, len(plan.pieces)).values()) == {None}
        for region in (Region.FINAL, Region.WINDOW):
            memory = reader.memory(region)
            assert memory is not None
            assert memory[:] == expected(plan, data, region)

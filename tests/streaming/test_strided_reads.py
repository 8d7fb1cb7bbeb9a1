"""A rank's columns: every reader gives the bytes that slicing the file gives, however runs and gaps lie."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.write_tiny_model import TinyModel
from streaming import reader_choice
from streaming.back_end_reading import Wanted, fetch_all, open_batches, with_columns
from streaming.column_reads import reads_columns, skips_gaps, span_nbytes
from streaming.dummy import open_dummy_reader
from streaming.dummy_pattern import pattern_block
from streaming.open_files import FileState, state_of
from streaming.piece_cutting import ALONE_NBYTES, PIECE_NBYTES, STRETCH_NBYTES, cut_pieces
from streaming.prefetching import plan_blocks
from streaming.read_plan import Piece, ReadPlan, Region
from streaming.read_plan import plan_reads as plan_of_reads
from streaming.read_strategy import ReadMethod
from streaming.reader import ProcessReader, ThreadReader
from streaming.reading import fill_memory, fill_shared
from streaming.reading_records import RECORD, SHORT, FlatPiece
from tests.streaming.planned import plan_of
from tests.streaming.strided import NBYTES, SHAPES, assert_reads, errors, planned, sliced

READERS = {"process": ProcessReader, "threads": ThreadReader}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random bytes."""
    path = tmp_path_factory.mktemp("strided") / "weights.bin"
    path.write_bytes(random.Random(5).randbytes(NBYTES))
    return path


# --- every reader ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["direct", "lazy", "eager", "prefetch"])
@pytest.mark.parametrize("reader", READERS)
def test_each_strategy_gives_the_slices_of_the_file(file: Path, reader: str, strategy: str) -> None:
    plan = planned([file])
    made = READERS[reader](plan, method=ReadMethod(strategy=strategy, block_nbytes=100_000))
    assert_reads(made, plan, file.read_bytes())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("reader", READERS)
def test_random_strides_give_the_slices_of_the_file(file: Path, reader: str, seed: int) -> None:
    chance = random.Random(seed)
    shapes = []
    for _ in range(25):
        run = chance.choice([chance.randint(1, 50), chance.randint(50, 20_000)])
        stride = run + chance.choice([chance.randint(1, 100), chance.randint(100, 40_000)])
        first = chance.randrange(100_000)
        shapes.append((run, stride, chance.randint(2, (NBYTES - first - run) // stride + 1), first))
    plan = planned([file], shapes)
    assert_reads(READERS[reader](plan), plan, file.read_bytes())


@pytest.mark.parametrize(
    "load_format",
    [
        pytest.param(name, marks=pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed"))
        for name, module in (("fastsafetensors", "fastsafetensors"), ("runai_streamer", "runai_model_streamer"))
    ],
)
def test_each_back_end_gives_the_slices_of_the_file(file: Path, load_format: str) -> None:
    plan = planned([file])
    reader = reader_choice._open_back_end(plan, ReadMethod(strategy=load_format), device="cpu")
    assert_reads(reader, plan, file.read_bytes())


@pytest.mark.parametrize("threads", [False, True], ids=["process", "threads"])
def test_made_up_weights_give_the_slices_of_the_pattern(threads: bool) -> None:
    """Also across the end of the block that the pattern repeats."""
    block = pattern_block("random.BF16")
    plan = planned([Path("random.BF16")], [*SHAPES, (4096, 8192, 50, len(block) - 10_001)])
    assert_reads(open_dummy_reader(plan, threads=threads), plan, block * 4)


# --- faults ---------------------------------------------------------------------------------------------------------

ROWS = (100, 400, 5, 300)  # of a file of 2000 bytes the last run ends with it
FAR_ROWS = (100, 20_100, 5, 20_000)  # the same with gaps that are left out; 100,500 bytes


@pytest.mark.parametrize("strategy", ["direct", "lazy", "eager", "prefetch"])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("shape", "nbytes"), [(ROWS, 2000), (ROWS, 1999), (ROWS, 1000), (FAR_ROWS, 100_500), (FAR_ROWS, 100_499)]
)
def test_a_file_that_ends_within_the_last_run_or_before_it_is_a_short_read(
    tmp_path: Path, reader: str, strategy: str, shape: tuple[int, int, int, int], nbytes: int
) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(random.Random(1).randbytes(nbytes))
    run, stride, runs, first = shape
    plan = ReadPlan((path,), (Piece(0, 0, first, run * runs, Region.FINAL, 0, 0, run, stride),), run * runs, 0, {}, {})
    with closing(READERS[reader](plan, method=ReadMethod(strategy=strategy))) as made:
        whole = nbytes == first + (runs - 1) * stride + run
        assert errors(made, 1) == {0: None if whole else "short"}
        memory = made.memory(Region.FINAL)
        assert memory is not None
        assert not whole or memory[:] == sliced(path.read_bytes(), *shape)


def test_a_back_end_tells_a_short_read_and_fetches_plain_pieces_only(file: Path) -> None:
    regions = [memoryview(bytearray(1000))]
    asked: list[object] = []

    def fetch(batch: Sequence[object]) -> Iterator[int]:
        asked.extend(batch)
        yield 1

    pieces = [(0, 300, 500, 0, 0, 0, 100, 400), (0, 0, 10, 0, 500, 0), (0, NBYTES - 500, 200, 0, 600, 0, 100, 401)]
    batches = open_batches(pieces, [str(file)])
    states: dict[str, FileState] = {str(file): state_of(os.stat(file))}
    records: list[bytes] = []
    fetch_all(batches, with_columns(fetch, regions), states, records.append, lambda error: None)
    assert [RECORD.unpack(record)[:2] for record in records] == [(0, 0), (1, 0), (2, SHORT)]
    assert regions[0][:500] == sliced(file.read_bytes(), 100, 400, 5, 300)
    assert asked == [Wanted(1, str(file), 0, 10, 0, 500, 0)]


@pytest.mark.parametrize("most", [1, 99, 250])
def test_calls_of_the_system_that_are_cut_short_lose_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Each takes at most some bytes, as it may by its definition."""

    def some_written(descriptor: int, runs: Sequence[memoryview], offset: int) -> int:
        return os.pwrite(descriptor, b"".join(runs)[:most], offset)

    def some_read(descriptor: int, places: Sequence[memoryview], offset: int) -> int:
        got = os.pread(descriptor, min(most, sum(map(len, places))), offset)
        rest = memoryview(got)
        for place in places:
            part = rest[: len(place)]
            place[: len(part)] = part
            rest = rest[len(part) :]
        return len(got)

    monkeypatch.setattr(os, "pwritev", some_written)
    monkeypatch.setattr(os, "preadv", some_read)
    piece = FlatPiece(0, 300, 500, 0, 64, 0, 100, 400)
    memory = os.memfd_create("test")
    own = memoryview(bytearray(1000))
    descriptor = os.open(file, os.O_RDONLY)
    try:
        assert fill_shared([memory])(descriptor, piece) == 0
        assert fill_memory([own])(descriptor, piece) == 0
        shared = os.pread(memory, 2000, 64)
    finally:
        os.close(descriptor)
        os.close(memory)
    assert shared == own[64:564] == sliced(file.read_bytes(), 100, 400, 5, 300)


# --- plans ----------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(st.integers(1, 5000), st.integers(1, 20 << 20)),
    st.one_of(st.integers(1, 5000), st.integers(1, 40 << 20)),
    st.integers(1, 3000),
)
def test_pieces_of_a_strided_item_are_its_bytes_in_order(run: int, gap: int, runs: int) -> None:
    stride = run + gap
    runs = min(runs, (128 << 20) // run + 1)
    done = 0
    for start, before, nbytes, apart in cut_pieces(run * runs, run, stride):
        assert before == done
        assert start == done // run * stride + done % run
        assert nbytes <= PIECE_NBYTES
        if apart:  # whole runs, of a stretch that is not too long
            assert (apart, done % run, nbytes % run) == (stride, 0, 0)
            assert nbytes // run > 1
            assert span_nbytes(nbytes, run, stride) <= STRETCH_NBYTES
        else:
            assert done % run + nbytes <= run
        done += nbytes
    assert done == run * runs


def test_items_of_one_run_are_cut_as_ever_and_long_runs_stand_alone() -> None:
    mib = 1 << 20
    plain = [(0, 0, 8 * mib, 0), (8 * mib, 8 * mib, 1, 0)]
    assert list(cut_pieces(8 * mib + 1, 0, 0)) == plain
    assert list(cut_pieces(8 * mib + 1, 4, 4)) == plain
    assert list(cut_pieces(2 * ALONE_NBYTES, ALONE_NBYTES, 2 * mib)) == [(0, 0, mib, 0), (2 * mib, mib, mib, 0)]
    assert list(cut_pieces(8, 4, ALONE_NBYTES + 4)) == [(0, 0, 4, 0), (mib + 4, 4, 4, 0)]
    assert list(cut_pieces(6 * 4096, 4096, 16 * mib // 2)) == [(row * 8 * mib, row * 4096, 4096, 0) for row in range(6)]
    assert list(cut_pieces(3 * 4096, 4096, 8192)) == [(0, 0, 3 * 4096, 8192)]
    assert list(cut_pieces(0, 0, 0)) == []


def test_strided_items_are_planned_into_pieces_and_never_kept_in_their_file() -> None:
    plan = plan_of(TinyModel(layers=1))
    down = next(item for item in plan.items if item.param.name.endswith("down_proj.weight"))
    rows, columns = down.tensor.shape
    half = replace(down.tensor, shape=(rows, columns // 2), nbytes=down.tensor.nbytes // 2, offset=down.tensor.offset)
    strided = replace(down, tensor=half, stride_nbytes=columns * 2)
    layers = tuple(
        replace(layer, items=tuple(strided if item is down else item for item in layer.items)) for layer in plan.layers
    )
    key = (down.param.name, "weight")
    cut = plan_of_reads(replace(plan, layers=layers), window_nbytes=64, keep_maps=True)
    (piece,) = [piece for piece in cut.pieces if piece.item == down.index]
    assert (piece.file_offset, piece.nbytes) == (down.file_offset, rows * columns)
    assert (piece.run_nbytes, piece.stride_nbytes, piece.region) == (columns, columns * 2, Region.FINAL)
    assert key not in cut.mapped
    assert {(p.run_nbytes, p.stride_nbytes) for p in cut.pieces if p.item != down.index} == {(0, 0)}


def test_a_job_says_no_more_of_plain_pieces_than_before(file: Path) -> None:
    from streaming.reader import _as_told, _flat

    plan = planned([file], [ROWS])
    assert [_as_told(piece) for piece in _flat(plan)] == [(0, 300, 500, 0, 0, 0, 100, 400), (0, 310, 100, 0, 500, 0)]


def test_prefetching_takes_short_gaps_along_and_leaves_long_ones_out() -> None:
    near, far = FlatPiece(0, 300, 500, 0, 0, 0, 100, 400), FlatPiece(0, 5000, 200, 0, 0, 0, 100, 20_000)
    assert plan_blocks([near, far], block_nbytes=1500) == [
        (0, 300, 1500, 0, 0), (0, 1800, 200, 0, 1500), (0, 5000, 100, 1, 1700), (0, 25_000, 100, 1, 1800),
    ]  # fmt: skip


def test_what_is_read_of_a_row() -> None:
    assert reads_columns(4096, 2048)
    assert reads_columns(4096, 2)
    assert not reads_columns(4096, 4096)  # all of it
    assert not reads_columns(128, 64)
    assert not skips_gaps(4096, 8192)
    assert skips_gaps(4096, 32_768)
    assert span_nbytes(500, 100, 400) == 1700
    assert span_nbytes(500, 0, 0) == 500


@pytest.mark.parametrize("reader", READERS)
def test_a_strided_piece_of_a_file_that_was_replaced_is_told(tmp_path: Path, file: Path, reader: str) -> None:
    path = tmp_path / "weights.bin"
    shutil.copyfile(file, path)
    plan = replace(planned([path], [ROWS]), states=(state_of(os.stat(path)),))
    other = tmp_path / "other.bin"
    shutil.copyfile(file, other)
    other.replace(path)
    with closing(READERS[reader](plan, method=ReadMethod(threads=1))) as made:
        assert errors(made, 1)[0] == "changed"

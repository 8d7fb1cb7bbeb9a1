"""Every way of reading gives the same logits to the bit, and does what its name says."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.write_tiny_model import TinyModel, write_tiny_model
from streaming import LLM, LayerLoadError, SamplingParams
from streaming.errors import BudgetError, CheckpointError, OptionError
from streaming.open_files import OpenFiles, state_of
from streaming.options import LoadOptions
from streaming.prefetching import Prefetcher, plan_blocks
from streaming.prepare import prepare
from streaming.read_plan import Piece, ReadPlan, Region
from streaming.read_strategy import ReadMethod
from streaming.reader import ProcessReader, Reader, ThreadReader
from streaming.reader_choice import start_reader
from streaming.reading_records import FlatPiece
from tests.streaming.gates import reading_with
from tests.streaming.leftovers import nothing_left
from tests.streaming.resident import resident_model, run_resident, same_bits
from tests.streaming.waiting import SOON_S

IDS = [5, 9, 2, 7]
ROOT = Path(__file__).parents[2]
STRATEGIES = ("lazy", "eager", "prefetch", "direct")
READERS = {"process": ProcessReader, "threads": ThreadReader}


@pytest.fixture(scope="module")
def aligned(four_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, its headers padded with spaces so that the data of each file begin at a multiple of 64."""
    folder = tmp_path_factory.mktemp("aligned")
    for file in four_layers.iterdir():
        data = file.read_bytes()
        if file.suffix == ".safetensors":
            size = int.from_bytes(data[:8], "little")
            padded = -(-(8 + size) // 64) * 64 - 8
            data = padded.to_bytes(8, "little") + data[8 : 8 + size].ljust(padded) + data[8 + size :]
        (folder / file.name).write_bytes(data)
    return folder


@pytest.mark.parametrize("reader", ["process", "threads"])
@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
@pytest.mark.parametrize("quantization", ["none", "int8_per_channel"])
def test_every_strategy_gives_the_resident_models_logits(
    four_layers: Path, aligned: Path, strategy: str | None, reader: str, quantization: str
) -> None:
    expected = run_resident(resident_model(four_layers, quantization=quantization), IDS).logits
    for folder in (four_layers, aligned):
        options: Any = {"safetensors_load_strategy": strategy, "reader": reader, "quantization": quantization}
        with nothing_left(), LLM(folder, window="64KiB", **options) as llm:
            assert same_bits(llm.logits(IDS), expected)
            llm.wait_loaded()
            assert same_bits(llm.logits(IDS), expected)
            found = llm.stats()
            assert found.read_strategy == (strategy or "direct")
            assert found.bytes_read == llm.prepared.plan.read_nbytes
            assert ("local files" if strategy is None else f"-strategy {strategy}") in found.read_strategy_reason
            del llm


def test_the_choice_is_one_line_of_the_log(four_layers: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="streaming.read_choice"):
        prepare(str(four_layers), LoadOptions())
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("reading with direct: local files (")


def test_the_number_of_threads_is_the_readers(four_layers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for extra, threads in ((None, 2), ('{"num_threads": 5}', 5), ({"enable_multithread_load": True}, 8)):
        before = set(threading.enumerate())
        options = LoadOptions(reader="threads", model_loader_extra_config=extra)
        prepared = prepare(str(four_layers), options)
        started: list[str] = []
        start = threading.Thread.start

        def count(thread: threading.Thread, into: list[str] = started, start: Any = start) -> None:
            into.append(thread.name)
            start(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", count)
            start_reader(prepared).close()
        assert started == ["firstlayer-read"] * threads
        assert {thread for thread in set(threading.enumerate()) - before if thread.is_alive()} == set()


# --- lazy -----------------------------------------------------------------------------------------------------------


def mapped_file_of(address: int) -> str | None:
    """The file whose map holds the address, as the system tells."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, stop = line.split()[0].partition("-")
        if int(start, 16) <= address < int(stop, 16):
            return line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) > 5 else None
    return None


def test_lazy_keeps_aligned_weights_in_their_file_and_moves_the_others(aligned: Path) -> None:
    with LLM(aligned, safetensors_load_strategy="lazy") as llm:
        llm.wait_loaded()
        plan = llm.prepared.read_plan
        assert plan.mapped
        assert plan.final_offsets
        for name, param in llm.shell.state_dict().items():
            inside = mapped_file_of(param.data_ptr())
            weight = name.rpartition(".")[2]
            if (name, weight) in plan.mapped:
                assert inside is not None
                assert inside.startswith(str(aligned))
                assert param.data_ptr() % 64 == 0
            elif inside is not None:
                assert not inside.startswith(str(aligned))


def test_memory_that_cannot_be_had_leaves_no_map_open(aligned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr("streaming.device.Arena", none_left)
    with nothing_left(), pytest.raises(MemoryError):
        LLM(aligned, safetensors_load_strategy="lazy")


def test_a_kept_file_that_is_written_to_is_named_at_the_next_lease(aligned: Path, tmp_path: Path) -> None:
    folder = copy_of(aligned, tmp_path)
    with LLM(folder, safetensors_load_strategy="lazy") as llm:
        llm.wait_loaded()
        llm.logits(IDS)
        file = kept_file(llm)
        os.utime(file, ns=(1, 1))
        with pytest.raises(CheckpointError, match="was written to since the load was planned") as caught:
            llm.logits(IDS)
        assert str(file) in str(caught.value)


def test_a_kept_file_that_shrinks_is_named_and_the_process_lives(aligned: Path, tmp_path: Path) -> None:
    folder = copy_of(aligned, tmp_path)
    with LLM(folder, safetensors_load_strategy="lazy") as llm:
        llm.wait_loaded()
        file = kept_file(llm)
        size = file.stat().st_size
        os.truncate(file, 64)
        with pytest.raises(CheckpointError, match=f"has 64 bytes in place of {size:,} since the load"):
            llm.logits(IDS)


def test_a_file_that_changes_between_the_plan_and_its_map_is_named(aligned: Path, tmp_path: Path) -> None:
    folder = copy_of(aligned, tmp_path)
    file = next(iter(sorted(folder.glob("*.safetensors"))))

    def touch(prepared: Any) -> Reader:
        reader = start_reader(prepared)
        os.utime(file, ns=(1, 1))
        return reader

    with pytest.raises(CheckpointError, match="was written to since the load was planned"), reading_with(touch):
        LLM(folder, safetensors_load_strategy="lazy")


def copy_of(folder: Path, tmp_path: Path) -> Path:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def kept_file(llm: LLM) -> Path:
    """The file in which something of the first decoder layer stays."""
    plan = llm.prepared.read_plan
    file = next(place[0] for (param, _), place in plan.mapped.items() if param.startswith("model.layers.0."))
    return Path(str(plan.files[file]))


def test_a_quantized_load_keeps_no_map_of_what_it_quantizes(aligned: Path) -> None:
    prepared = prepare(str(aligned), LoadOptions(safetensors_load_strategy="lazy", quantization="int8_per_channel"))
    assert not [key for key in prepared.read_plan.mapped if "proj" in key[0]]
    assert not prepare(str(aligned), LoadOptions(safetensors_load_strategy="direct")).read_plan.mapped


# --- files that change ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_replaced_after_the_plan_is_named(tmp_path: Path, strategy: str, reader: str) -> None:
    folder = write_tiny_model(tmp_path / "model", model=TinyModel(layers=2, files=1))
    file = folder / "model.safetensors"

    def put_another(prepared: Any) -> Reader:
        other = file.with_suffix(".new")
        other.write_bytes(file.read_bytes())
        other.replace(file)
        made: Reader = READERS[reader](prepared.read_plan, method=ReadMethod(strategy=strategy))
        return made

    with pytest.raises(LayerLoadError) as caught, reading_with(put_another):  # noqa: SIM117
        with LLM(folder, safetensors_load_strategy=strategy if strategy != "lazy" else None) as llm:
            list(llm.generate(IDS, SamplingParams(max_tokens=1)))
    assert f"{file} was changed, or replaced, during the load" in str(caught.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_ends_too_early_is_a_short_read(tmp_path: Path, strategy: str, reader: str) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(bytes(range(256)) * 4)
    pieces = tuple(Piece(n, 0, n * 500, 500, Region.FINAL, n * 500, 0) for n in range(3))
    plan = ReadPlan((file,), pieces, 1500, 0, {}, {})
    with closing(READERS[reader](plan, method=ReadMethod(strategy=strategy, threads=1))) as made:
        done = {completion.piece: completion.error for completion in completions(made, 3)}
    assert done == {0: None, 1: None, 2: "short"}


def completions(reader: Reader, count: int) -> Iterator[Any]:
    import select

    found = 0
    while found < count:
        assert select.select([reader.fileno()], [], [], SOON_S)[0]
        for completion in reader.completions():
            found += 1
            yield completion


# --- descriptors ----------------------------------------------------------------------------------------------------


@contextmanager
def limit_of_descriptors(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("strategy", ["direct", "eager", "prefetch", "lazy"])
def test_more_files_than_descriptors_are_read_all_the_same(tmp_path: Path, strategy: str) -> None:
    """200 files, of which each is due twice, in a program that may have 24 open at once."""
    files = tuple(tmp_path / f"{number}.bin" for number in range(200))
    for number, file in enumerate(files):
        file.write_bytes(number.to_bytes(2, "big") * 2)
    pieces = tuple(Piece(n, n % 200, 2 * (n // 200), 2, Region.FINAL, 2 * n, 0) for n in range(400))
    plan = ReadPlan(files, pieces, 800, 0, {}, {})
    program = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
from streaming.reading import main
main()
"""
    command = ("-c", f"import sys; sys.path.append({str(ROOT)!r})\n{program}")
    with closing(ProcessReader(plan, method=ReadMethod(strategy=strategy), program=command, by_path=True)) as reader:
        assert {completion.error for completion in completions(reader, 400)} == {None}
        memory = reader.memory(Region.FINAL)
        assert memory is not None
        assert memory[:] == b"".join(number.to_bytes(2, "big") for number in range(200)) * 2


def test_without_any_descriptor_left_the_limit_is_named(four_layers: Path) -> None:
    prepared = prepare(str(four_layers), LoadOptions())
    with limit_of_descriptors(3), pytest.raises(CheckpointError) as caught:
        ProcessReader(prepared.read_plan)
    assert "too many open files: this process may have 3 open at once" in str(caught.value)
    assert "ulimit -n" in str(caught.value)


def test_idle_files_are_closed_for_others_and_opened_again(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{number}") for number in range(3)]
    for path in paths:
        Path(path).write_text(path)
    files = OpenFiles(paths, [state_of(os.stat(path)) for path in paths], [2, 2, 2])
    descriptors = [files.take(number) for number in (0, 1)]
    files.give_back(0)
    with limit_of_descriptors(max(descriptors) + 1):
        third = files.take(2)  # descriptor 0 was closed for it
        assert os.pread(third, 999, 0).decode() == paths[2]
        with pytest.raises(OSError, match="Too many open files") as caught:
            files.take(0)
    assert caught.value.errno == errno.EMFILE
    assert files.give_back(1) == 0
    files.close()
    assert os.pread(third, 999, 0).decode() == paths[2]  # it is in use until it is given back
    assert files.give_back(2) == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(third)
    with pytest.raises(OSError, match="Operation canceled"):
        files.take(0)


# --- prefetch and eager ---------------------------------------------------------------------------------------------


def test_blocks_follow_the_plan_and_join_what_touches() -> None:
    pieces = [FlatPiece(*place, 0, 0, 0) for place in ((0, 0, 10), (0, 10, 10), (1, 0, 25), (0, 20, 5))]
    assert plan_blocks(pieces, block_nbytes=20) == [
        (0, 0, 20, 1, 0),
        (1, 0, 20, 2, 20),
        (1, 20, 5, 2, 40),
        (0, 20, 5, 3, 45),
    ]


def test_the_prefetcher_stays_within_its_bound_of_the_reader(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(bytes(400))
    pieces = [FlatPiece(0, 100 * number, 100, 0, 0, 0) for number in range(4)]
    blocks = plan_blocks(pieces, block_nbytes=100)
    files = OpenFiles([str(file)], [state_of(file.stat())], [4])
    ahead = Prefetcher(blocks, files, sizes=[100] * 4, ahead_nbytes=200)
    thread = threading.Thread(target=ahead.run)
    thread.start()
    reached = [wait_for_blocks(ahead, 2)]
    ahead.passed(0)
    reached.append(wait_for_blocks(ahead, 3))
    ahead.passed(1)
    ahead.passed(2)
    ahead.passed(3)  # the last block is overtaken, or fetched: either way the thread ends
    thread.join(SOON_S)
    files.close()
    assert not thread.is_alive()
    assert reached == [[0, 1], [0, 1, 2]]


def wait_for_blocks(ahead: Prefetcher, count: int) -> list[int]:
    with ahead._changed:
        assert ahead._changed.wait_for(lambda: len(ahead.fetched) >= count, SOON_S)
        return list(ahead.fetched)


@pytest.mark.parametrize("reader", READERS)
def test_eager_takes_all_that_has_room_while_a_file_is_in_memory(tmp_path: Path, reader: str) -> None:
    """Pieces of two files by turns; the first file's window piece waits for room that comes last."""
    files = (tmp_path / "a", tmp_path / "b")
    files[0].write_bytes(b"aAxX")
    files[1].write_bytes(b"bB")
    pieces = (
        Piece(0, 0, 0, 1, Region.FINAL, 0, 0), Piece(1, 1, 0, 1, Region.FINAL, 1, 0),
        Piece(2, 0, 1, 1, Region.FINAL, 2, 0), Piece(3, 1, 1, 1, Region.FINAL, 3, 0),
        Piece(4, 0, 2, 1, Region.WINDOW, 0, 0), Piece(5, 0, 3, 1, Region.WINDOW, 0, 1),
    )  # fmt: skip
    plan = ReadPlan(files, pieces, 4, 1, {}, {})
    with closing(READERS[reader](plan, method=ReadMethod(strategy="eager"))) as made:
        first = [completion.piece for completion in completions(made, 5)]
        final, window = made.memory(Region.FINAL), made.memory(Region.WINDOW)
        assert final is not None
        assert window is not None
        assert (first, final[:], window[:]) == ([0, 2, 1, 3, 4], b"abAB", b"x")
        made.release(1)
        assert [completion.piece for completion in completions(made, 1)] == [5]
        assert window[:] == b"X"


def test_options_of_prefetch_are_refused_where_another_strategy_is_chosen(four_layers: Path) -> None:
    with pytest.raises(OptionError, match=r"goes with .* prefetch; direct is used: local files"):
        prepare(str(four_layers), LoadOptions(safetensors_prefetch_num_threads=2))


def test_prefetch_takes_its_numbers(four_layers: Path) -> None:
    with LLM(
        four_layers, safetensors_load_strategy="prefetch", safetensors_prefetch_num_threads=3,
        safetensors_prefetch_block_size="4KiB", reader="threads",
    ) as llm:  # fmt: skip
        llm.wait_loaded()


def test_the_plan_of_eager_counts_its_largest_file(four_layers: Path) -> None:
    largest = max(file.stat().st_size for file in four_layers.glob("*.safetensors"))
    direct = prepare(str(four_layers), LoadOptions()).budget
    eager = prepare(str(four_layers), LoadOptions(safetensors_load_strategy="eager")).budget
    assert (direct.file_nbytes, eager.file_nbytes) == (0, largest)
    assert eager.peak_nbytes - direct.peak_nbytes == largest
    with pytest.raises(BudgetError, match="of files that the reader holds"):
        prepare(str(four_layers), LoadOptions(safetensors_load_strategy="eager", memory=direct.peak_nbytes))


def test_plan_says_how_the_files_are_read(four_layers: Path) -> None:
    command = [sys.executable, "-m", "streaming", "plan", str(four_layers), "--safetensors-load-strategy", "eager"]
    found = json.loads(subprocess.run([*command, "--json"], capture_output=True, cwd=ROOT, check=True).stdout)
    assert (found["read_strategy"], found["peak"]["file"] > 0) == ("eager", True)
    assert found["read_strategy_reason"] == "--safetensors-load-strategy eager"


# --- torchao --------------------------------------------------------------------------------------------------------


def test_torchao_is_refused_for_other_checkpoints(four_layers: Path) -> None:
    with pytest.raises(OptionError, match="is not serialized by torchao"):
        prepare(str(four_layers), LoadOptions(safetensors_load_strategy="torchao"))

"""Streamed weights that the forward pass uses by itself where they lie, once all of them do."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from examples.write_tiny_model import TinyModel
from streaming import LLM, LayerLoadError, units_in_place
from streaming.file_views import joined
from tests.streaming.limits import limit_of
from tests.streaming.test_file_views import (
    IDS,
    LAZY,
    Tiny,
    answers,
    cut,
    goes_on_while_files_are_opened,
    resident_nbytes,
    rewritten,
    stream_of,
)
from tests.streaming.waiting import in_background, until

AROUND_NBYTES = 4 << 20  # the system sets up pages around those that are touched


@pytest.fixture
def folder(tiny_folder: Tiny, tmp_path: Path) -> Path:
    """Of the test alone."""
    return Path(shutil.copytree(tiny_folder(TinyModel(layers=6)), tmp_path / "model"))


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    """After two passes: the second one has found all in the page cache."""
    with LLM(folder, memory=limit_of(folder, 0.2, **LAZY), **LAZY | {"safetensors_load_strategy": None}) as llm:
        llm.wait_loaded()
        for _ in range(2):
            llm.logits(IDS)
        if not stream_of(llm)._in_place.is_on:
            pytest.skip("this system does not say what is in the page cache, or leases no files")
        yield llm


def passed(llm: LLM) -> tuple[int, int]:
    """Bytes that have passed through, and those of them that were used where they lie."""
    counts = stream_of(llm).counts
    return counts.streamed_nbytes, counts.in_place_nbytes


def brought_in_a_pass(llm: LLM) -> int:
    """Bytes that threads bring for the next pass."""
    before = passed(llm)
    llm.logits(IDS)
    after = passed(llm)
    assert after[0] - before[0] == stream_of(llm).plan.pass_nbytes
    return after[0] - before[0] - (after[1] - before[1])


def test_threads_rest_while_everything_lies_where_it_is_used(llm: LLM, folder: Path) -> None:
    brought_in_a_pass(llm)  # what they had brought ahead
    assert [brought_in_a_pass(llm) for _ in range(3)] == [0, 0, 0]
    assert not stream_of(llm)._live
    found = answers(llm)
    with LLM(folder, max_model_len=64) as whole:
        expected = answers(whole)
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1]


def test_the_pages_of_a_pass_stay_within_the_room_that_it_has(tiny_folder: Tiny) -> None:
    folder = tiny_folder(TinyModel(layers=8, hidden_size=512, intermediate_size=2048))
    files = list(folder.glob("*.safetensors"))
    with LLM(folder, memory=limit_of(folder, 0.0, **LAZY), **LAZY) as llm:
        llm.logits(IDS)
        llm.logits(IDS)
        stream, most = stream_of(llm), 0
        if not stream._in_place.is_on:
            pytest.skip("this system does not say what is in the page cache, or leases no files")
        for unit in [*stream.units, *stream.units]:
            with stream.lease_unit(unit, stop=lambda: None) as leased:
                assert leased is not None
                for tensor in leased.values() if isinstance(leased, dict) else leased.parts:  # type: ignore[union-attr]
                    tensor.float().sum()
                most = max(most, sum(resident_nbytes(str(file)) for file in files))
        assert 0 < most <= stream.plan.ring_nbytes + len(files) * AROUND_NBYTES
        stream.change(stream.plan)
        assert sum(resident_nbytes(str(file)) for file in files) <= len(files) * AROUND_NBYTES


def test_what_the_system_has_dropped_is_brought_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    brought_in_a_pass(llm)
    expected = answers(llm)
    waits = units_in_place._faults()
    monkeypatch.setattr(units_in_place, "_faults", lambda: waits + 1)
    assert brought_in_a_pass(llm) == stream_of(llm).plan.pass_nbytes
    assert torch.equal(llm.logits(IDS), expected[0])
    until(lambda: stream_of(llm)._in_place.is_on)  # until the next time
    brought_in_a_pass(llm)
    assert brought_in_a_pass(llm) == 0


@pytest.mark.parametrize("change", [rewritten, cut])
def test_a_file_that_has_changed_is_not_used(llm: LLM, folder: Path, change: Callable[[Path], None]) -> None:
    brought_in_a_pass(llm)
    for file in folder.glob("*.safetensors"):
        change(file)
    stream, changed = stream_of(llm), r"stage read, tensor model\.layers.*(was changed, or replaced|it shrank)"
    with pytest.raises(LayerLoadError, match=changed), stream.lease_unit(stream.plan.streamed[0], stop=lambda: None):
        pass
    with pytest.raises(LayerLoadError, match=r"was changed, or replaced|it shrank"):
        llm.logits(IDS)


def test_a_file_that_was_opened_alone_goes_on(llm: LLM, folder: Path) -> None:
    brought_in_a_pass(llm)
    goes_on_while_files_are_opened(llm, folder)


def test_a_file_that_somebody_holds_open_for_writing_is_copied(llm: LLM, folder: Path) -> None:
    brought_in_a_pass(llm)
    expected, (file, *_) = llm.logits(IDS), sorted(folder.glob("*.safetensors"))
    opened = in_background(lambda: file.open("r+b"))  # waits for the lease
    with opened.result():
        for _ in range(3):
            assert torch.equal(llm.logits(IDS), expected)
        assert brought_in_a_pass(llm) > 0
    for _ in range(3):
        llm.logits(IDS)
    assert brought_in_a_pass(llm) == 0


def test_a_pass_may_be_given_up_anywhere_and_another_one_begun(llm: LLM) -> None:
    brought_in_a_pass(llm)
    expected, chance, stream = llm.logits(IDS), random.Random(0), stream_of(llm)
    units = stream.plan.streamed
    for _ in range(30):
        first, last = sorted(chance.choices(range(len(units)), k=2))
        for unit in units[first:last]:
            with stream.lease_unit(unit, stop=lambda: None):
                pass
        with pytest.raises(KeyboardInterrupt), stream.lease_unit(units[last], stop=lambda: None):
            raise KeyboardInterrupt
        assert not stream._used_in_place
    assert torch.equal(llm.logits(IDS), expected)


def test_the_limit_changes_while_a_unit_is_used(llm: LLM, folder: Path) -> None:
    brought_in_a_pass(llm)
    expected, stream = llm.logits(IDS), stream_of(llm)
    with stream.lease_unit(stream.plan.streamed[0], stop=lambda: None):
        changing = threading.Thread(target=llm.set_memory, args=(limit_of(folder, 0.6, **LAZY),))
        changing.start()
        changing.join(0.2)
        assert changing.is_alive()  # what it would bring has no room yet
    changing.join()
    for share in (0.6, 0.1, 0.8, 0.3):
        limit = limit_of(folder, share, **LAZY)
        llm.set_memory(limit)
        for _ in range(4):
            assert torch.equal(llm.logits(IDS), expected)
        assert llm.stats().peak_budget_bytes <= max(limit, limit_of(folder, 0.8, **LAZY))
    brought_in_a_pass(llm)
    assert brought_in_a_pass(llm) == 0


def test_runs_that_touch_are_one() -> None:
    chance = random.Random(0)
    for _ in range(300):
        runs = [(chance.randrange(60), chance.randrange(1, 9)) for _ in range(chance.randrange(9))]
        found = joined(runs)
        assert {at for start, length in found for at in range(start, start + length)} == {
            at for start, length in runs for at in range(start, start + length)
        }
        assert all(start + length < after for (start, length), (after, _) in pairwise(found))

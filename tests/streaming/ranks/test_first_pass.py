"""The first pass of a pipeline: who may be waited for without a limit, and who is late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from layers.topology import Topology
from streaming.evaluate import prompt_logits
from streaming.ranks.first_pass import FirstPass
from streaming.residency import Residency
from tests.streaming.ranks.test_ready_everywhere import IDS, Gate
from tests.streaming.ranks.threaded import open_ranked
from tests.streaming.waiting import until

TIMEOUT_S = 10.0


@pytest.fixture
def first() -> FirstPass:
    """Ranks 0 and 1 are the first stage, 2 and 3 the second, of which 2 sends; a step has begun at 100 s."""
    opened = FirstPass(Topology(tensor=2, pipeline=2))
    opened.begin([2], 100.0)
    return opened


def late(first: FirstPass, now_s: float, seen_s: dict[int, float] | None = None, held: tuple[int, ...] = ()) -> Any:
    return first.late(seen_s or {}, held=held, now_s=now_s, timeout_s=TIMEOUT_S)


def test_a_rank_of_the_first_stage_is_late_when_it_shows_no_progress(first: FirstPass) -> None:
    assert late(first, 109.0) is None
    assert late(first, 111.0) == 0
    assert late(first, 111.0, {0: 105.0, 1: 90.0}) == 1
    assert late(first, 111.0, {0: 105.0, 1: 104.0}) is None


def test_a_stage_that_waits_for_the_one_before_is_not_late(first: FirstPass) -> None:
    assert late(first, 500.0, {0: 499.0, 1: 499.0, 2: 101.0}) is None
    first.note(0, 501.0)
    first.note(1, 502.0)
    assert late(first, 511.0, {2: 101.0}) is None
    assert late(first, 513.0, {2: 101.0}) == 2


def test_a_rank_that_waits_for_a_layer_of_its_own_stage_is_not_late(first: FirstPass) -> None:
    assert late(first, 111.0, held=(0,)) is None
    assert late(first, 111.0, held=(1,)) == 0


def test_nobody_is_late_once_all_are_through_or_where_there_is_no_step(first: FirstPass) -> None:
    for rank in (0, 1, 2):
        first.note(rank, 101.0)
    assert late(first, 1000.0) is None
    fresh = FirstPass(Topology(tensor=2, pipeline=2))
    assert late(fresh, 1000.0) is None
    fresh.begin([2], 0.0)
    fresh.end()
    assert late(fresh, 1000.0) is None


@pytest.mark.parametrize("slow", [0, 1])
def test_nobody_receives_from_a_stage_that_still_loads(
    four_layers: Path, slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receive ends with an error after --rank-timeout, and the other stage may load for longer."""
    gate, waiting, received = Gate(f"layers.{2 * slow}"), set[int](), list[int]()
    await_through = Residency.await_through

    def note_wait(residency: Residency, rank: int, **given: Any) -> None:
        waiting.add(rank)
        await_through(residency, rank, **given)
        received.append(rank)

    monkeypatch.setattr(Residency, "await_through", note_wait)
    with open_ranked(four_layers) as one:
        expected = one.logits(IDS)
    with open_ranked(four_layers, hooks={slow: gate.hooks}, pipeline_parallel_size=2) as ranked:
        model = ranked.model
        job = model.submit_call(lambda runner, stop: prompt_logits(model, IDS, stop))
        until(lambda: slow in waiting)
        assert slow not in received
        gate.open()
        torch.testing.assert_close(next(job.results()), expected, rtol=0, atol=1e-4)
    assert set(received) == {0, 1}

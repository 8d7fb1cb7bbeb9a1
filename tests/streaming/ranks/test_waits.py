"""A wait in a collective is booked on the rank that came last, in the trace and in the sums."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from streaming.ranks.waits import LONG_S, MOST, Meter, Wait, Waits
from tests.streaming.ranks.processes import running

RANKS = (0, 1, 2, 3)


def settled(waits: Waits) -> list[tuple[str, float]]:
    return [(name, round(wait.seconds, 6)) for name, wait in waits.settle()]


def test_who_does_not_wait_along_is_the_one_that_was_waited_for() -> None:
    waits = Waits()
    waits.note_own(Wait(RANKS, 7, 10.0, 12.0))
    waits.note_other(1, RANKS, 7, 1.9)
    waits.note_other(3, RANKS, 7, 2.1)
    waits.note_other(2, RANKS, 6, 2.0)  # another collective
    waits.note_other(2, (0, 2), 7, 2.0)  # another group
    assert settled(waits) == [("rank 2", 2.0)]
    assert settled(waits) == []


def test_several_may_be_late_and_a_short_wait_is_none() -> None:
    waits = Waits()
    waits.note_own(Wait(RANKS, 1, 0.0, 1.0))
    waits.note_other(1, RANKS, 1, 0.9)
    waits.note_other(2, RANKS, 1, 0.1)  # it came soon after the last one
    assert settled(waits) == [("rank 2, 3", 1.0)]


def test_hours_of_waits_that_nobody_asks_for_take_no_more_memory_than_the_first() -> None:
    waits = Waits()
    for number in range(MOST + 10):
        waits.note_own(Wait(RANKS, number, 0.0, 1.0))
        waits.note_other(1, RANKS, number, 1.0)
    assert (len(waits._own), len(waits._others)) == (MOST, MOST)
    assert len(settled(waits)) == MOST


def test_who_stood_still_while_it_waited_along_was_waited_for() -> None:
    waits, now = Waits(), time.monotonic()
    for number in (1, 2):
        waits.note_own(Wait((0, 1, 2), number, now - 6.0 * number, now - 6.0 * number + 5.0))
        for rank in (1, 2):
            waits.note_other(rank, (0, 1, 2), number, 5.0)
    waits.note_stood(2, 6.0)
    assert settled(waits) == [("rank 2", 5.0), ("other ranks", 5.0)]


def test_a_meter_numbers_all_collectives_and_tells_of_long_ones() -> None:
    told: list[Wait] = []
    meter = Meter((0, 1), told.append, lambda: "layers.3")
    now = time.monotonic()
    for begin_s in (now, now - 2 * LONG_S, now, now - 3 * LONG_S):
        meter.note(begin_s)
    assert [(wait.number, wait.layer) for wait in told] == [(2, "layers.3"), (4, "layers.3")]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize("slow", [1, 2])
def test_a_rank_that_is_slow_by_5_s_is_no_error_and_the_stall_is_booked_on_it(
    slow: int, four_layers: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    command = (
        "-m", "streaming", "generate", str(four_layers), "--ids", "1,2,3", "--max-tokens", "250", "--ignore-eos",
        "--tensor-parallel-size", "4", "--rank-timeout", "30", "--trace", str(trace),
    )  # fmt: skip
    with running(command, tmp_path) as run:
        pid = run.await_rank(slow)
        run.await_text(" ")  # it generates
        os.kill(pid, signal.SIGSTOP)
        time.sleep(5)
        os.kill(pid, signal.SIGCONT)
        assert run.wait(60) == 0
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    stalls = [event for event in events if event.get("name") == f"rank {slow}" and event.get("dur", 0) > 4.5e6]
    assert any(event["args"].get("layer") for event in stalls), stalls  # in a step; ranks may have met late besides

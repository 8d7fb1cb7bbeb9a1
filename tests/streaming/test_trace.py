"""Spans, their summaries, and the Chrome trace file."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming.trace import (
    MARK,
    Span,
    Tracer,
    busy_seconds,
    lane_rows,
    lane_seconds,
    lanes_in_order,
    overlap_seconds,
    stall_seconds,
    write_chrome_trace,
    write_whole,
)


def span(lane: str, start_s: float, end_s: float, name: str = "x", layer: str = "") -> Span:
    return Span(lane, name, start_s, end_s, layer)


def test_a_timed_block_becomes_a_span_with_what_the_block_wrote_into_its_args() -> None:
    tracer = Tracer()
    with tracer.span("read", "q_proj", layer="layers.0") as args:
        args["nbytes"] = 7
    (only,) = tracer.spans()
    assert (only.lane, only.name, only.layer, only.args) == ("read", "q_proj", "layers.0", {"nbytes": 7})
    assert 0 <= only.seconds < 60


def test_a_block_that_fails_is_kept_with_the_error_and_the_error_goes_on() -> None:
    tracer = Tracer()
    with pytest.raises(KeyError), tracer.span("slice", "q_proj"):
        raise KeyError("no")
    assert tracer.spans()[0].args == {"error": "KeyError"}


def test_spans_come_by_their_start_whatever_order_they_ended_in() -> None:
    tracer = Tracer()
    tracer.add("forward", "late", start_s=2.0, end_s=3.0)
    tracer.add("read", "early", start_s=1.0, end_s=9.0)
    tracer.mark("first token", at_s=1.5)
    assert [found.name for found in tracer.spans()] == ["early", "first token", "late"]


def test_a_full_lane_keeps_its_first_spans_and_counts_the_others() -> None:
    tracer = Tracer(max_spans_per_lane=2)
    for step in range(5):
        tracer.add("forward", str(step), start_s=float(step), end_s=step + 0.5)
    tracer.add("read", "r", start_s=0.0, end_s=1.0)
    assert [found.name for found in tracer.spans() if found.lane == "forward"] == ["0", "1"]
    assert tracer.dropped() == {"forward": 3}


def test_bytes_of_spans_that_are_not_kept_are_counted() -> None:
    tracer = Tracer(max_spans_per_lane=2)
    for nbytes in (1, 10, 100):
        tracer.add("read", "r", start_s=0.0, end_s=1.0, args={"nbytes": nbytes})
    with tracer.span("read", "r") as args:
        args["nbytes"] = 1000
    assert (tracer.nbytes("read"), tracer.nbytes("slice")) == (1111, 0)


def test_no_span_is_lost_between_threads() -> None:
    tracer = Tracer()
    start = threading.Barrier(4)

    def work(lane: str) -> None:
        start.wait()
        for step in range(500):
            tracer.add(lane, str(step), start_s=float(step), end_s=step + 1.0)

    threads = [threading.Thread(target=work, args=(f"lane{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lane_seconds(tracer.spans()) == {f"lane{n}": 500.0 for n in range(4)}


def test_lane_seconds_add_up_parallel_work_and_busy_seconds_do_not() -> None:
    spans = [span("read", 0.0, 2.0), span("read", 1.0, 4.0), span("read", 5.0, 6.0), span(MARK, 1.0, 1.0)]
    assert lane_seconds(spans) == {"read": 6.0}
    assert busy_seconds(spans, "read") == 5.0
    assert busy_seconds(spans, "forward") == 0.0


def test_stalls_are_summed_by_the_stage_that_was_waited_for() -> None:
    spans = [span("stall", 0.0, 1.0, "read"), span("stall", 2.0, 2.5, "read"), span("stall", 3.0, 5.0, "quantize")]
    assert stall_seconds([*spans, span("forward", 0.0, 9.0, "read")]) == {"read": 1.5, "quantize": 2.0}


def test_overlap_counts_the_seconds_in_which_both_lanes_were_busy() -> None:
    spans = [
        span("read", 0.0, 2.0), span("read", 1.0, 3.0), span("read", 6.0, 7.0),
        span("forward", 2.5, 4.0), span("forward", 5.0, 6.5), span("forward", 6.75, 8.0),
    ]  # fmt: skip
    assert overlap_seconds(spans, "forward", "read") == pytest.approx(0.5 + 0.5 + 0.25)
    assert overlap_seconds(spans, "forward", "publish") == 0.0


def test_lanes_are_ordered_as_the_pipeline_runs_and_unknown_ones_come_last() -> None:
    assert lanes_in_order(["collective", "forward", "read", "import", "forward"]) == [
        "import", "read", "forward", "collective",
    ]  # fmt: skip


def test_spans_that_overlap_are_dealt_to_rows_and_those_that_follow_share_one() -> None:
    first, second, third = span("read", 0.0, 2.0), span("read", 1.0, 3.0), span("read", 2.0, 4.0)
    alone = span("forward", 0.0, 1.0)
    assert lane_rows([third, alone, first, second]) == {"read": [[first, third], [second]], "forward": [[alone]]}


times = st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda pair: (float(pair[0]), float(sum(pair))))


@given(st.lists(times, max_size=40))
def test_rows_hold_every_span_once_and_no_two_of_a_row_overlap(intervals: list[tuple[float, float]]) -> None:
    spans = [span("read", start_s, end_s) for start_s, end_s in intervals]
    rows = lane_rows(spans).get("read", [])
    assert sorted((s.start_s, s.end_s) for row in rows for s in row) == sorted(intervals)
    assert all(left.end_s <= right.start_s for row in rows for left, right in itertools.pairwise(row))


@given(st.lists(times, max_size=20), st.lists(times, max_size=20))
def test_overlap_and_busy_agree_with_counting_second_by_second(
    reads: list[tuple[float, float]], forwards: list[tuple[float, float]]
) -> None:
    spans = [span("read", *interval) for interval in reads] + [span("forward", *interval) for interval in forwards]
    in_read = {second for start_s, end_s in reads for second in range(int(start_s), int(end_s))}
    in_forward = {second for start_s, end_s in forwards for second in range(int(start_s), int(end_s))}
    assert busy_seconds(spans, "read") == len(in_read)
    assert overlap_seconds(spans, "read", "forward") == len(in_read & in_forward)


def test_the_chrome_trace_has_a_named_thread_per_lane_and_microseconds_from_the_origin(tmp_path: Path) -> None:
    spans = [
        Span("read", "q_proj", 10.5, 10.75, "layers.0", {"nbytes": 64}),
        Span("read", "k_proj", 10.6, 10.7, "layers.0"),
        Span("forward", "layers.0", 10.75, 11.0, "layers.0"),
        Span(MARK, "first token", 11.0, 11.0),
    ]
    path = tmp_path / "trace.json"
    write_chrome_trace(spans, path, origin_s=10.0, facts={"model": "tiny"})
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == {1: "read", 2: "read 2", 3: "forward"}
    assert next(event for event in events if event["ph"] == "X") == {
        "ph": "X", "pid": 1, "tid": 1, "cat": "read", "name": "q_proj", "ts": 500000.0, "dur": 250000.0,
        "args": {"layer": "layers.0", "nbytes": 64},
    }  # fmt: skip
    assert [(e["name"], e["ts"], e["s"]) for e in events if e["ph"] == "i"] == [("first token", 1000000.0, "p")]
    assert trace["otherData"] == {"model": "tiny"}


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\udcff")  # a lone surrogate has no UTF-8 form
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]

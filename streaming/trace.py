"""What happened when: spans from every stage and thread, their summaries, and the Chrome trace that Perfetto opens.

A span is one piece of work in one *lane* (a stage of the pipeline, or the forward pass). All times are seconds on
`time.monotonic`'s clock, so spans of several processes of one machine can lie in one picture. A mark is a span of no
length in the lane "mark" ("first token").
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

LANES = ("import", "shell", "read", "slice", "quantize", "post-process", "publish", "forward", "stall")
"""The known lanes in the order in which they are shown; others follow in the order of their first span."""

MARK = "mark"
"""The lane of marks."""

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work: seconds [start_s, end_s) of `time.monotonic`. `layer` is "" where it belongs to none."""

    lane: str
    name: str
    start_s: float
    end_s: float
    layer: str = ""
    args: Mapping[str, Value] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


class Tracer:
    """Collects spans from any thread. A lane keeps its first `max_spans_per_lane` spans and counts the rest, so that
    hours of decoding take no more memory than the first minutes."""

    def __init__(
        self, *, max_spans_per_lane: int = 20_000, on_begin: Callable[[str, str, str], None] | None = None
    ) -> None:
        """`on_begin(lane, name, layer)` is called, in its thread, whenever a block begins that is timed."""
        self._max, self.on_begin = max_spans_per_lane, on_begin
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self._kept: dict[str, int] = {}
        self._dropped: dict[str, int] = {}
        self._nbytes: dict[str, int] = {}

    def add(
        self,
        lane: str,
        name: str,
        *,
        start_s: float,
        end_s: float,
        layer: str = "",
        args: Mapping[str, Value] | None = None,
    ) -> None:
        """Keep a span whose times the caller took from `time.monotonic`."""
        with self._lock:
            self._nbytes[lane] = self._nbytes.get(lane, 0) + int((args or {}).get("nbytes", 0))
            kept = self._kept.get(lane, 0)
            if kept >= self._max:
                self._dropped[lane] = self._dropped.get(lane, 0) + 1
                return
            self._kept[lane] = kept + 1
            self._spans.append(Span(lane, name, start_s, end_s, layer, args or {}))

    def span(self, lane: str, name: str, *, layer: str = "") -> OpenSpan:
        """`with tracer.span("read", tensor, layer="layers.3") as args: ...; args["nbytes"] = n`: times the block."""
        return OpenSpan(self, lane, name, layer)

    def mark(self, name: str, *, at_s: float | None = None) -> None:
        """Keep a point in time (now, unless given), such as "first token"."""
        at_s = time.monotonic() if at_s is None else at_s
        self.add(MARK, name, start_s=at_s, end_s=at_s)

    def spans(self) -> tuple[Span, ...]:
        """Every span kept so far, by its start."""
        with self._lock:
            spans = tuple(self._spans)
        return tuple(sorted(spans, key=lambda span: span.start_s))

    def nbytes(self, lane: str) -> int:
        """The sum of what a lane's spans have as "nbytes", those that were not kept too."""
        with self._lock:
            return self._nbytes.get(lane, 0)

    def dropped(self) -> dict[str, int]:
        """How many spans of each lane were not kept, because the lane was full."""
        with self._lock:
            return dict(self._dropped)


class OpenSpan:
    """A span that is being timed; entering it gives the dict that becomes the span's args."""

    __slots__ = ("_args", "_lane", "_layer", "_name", "_start_s", "_tracer")

    def __init__(self, tracer: Tracer, lane: str, name: str, layer: str) -> None:
        self._tracer, self._lane, self._name, self._layer = tracer, lane, name, layer
        self._args: dict[str, Value] = {}
        self._start_s = 0.0

    def __enter__(self) -> dict[str, Value]:
        if self._tracer.on_begin is not None:
            self._tracer.on_begin(self._lane, self._name, self._layer)
        self._start_s = time.monotonic()
        return self._args

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._args["error"] = kind.__name__
        end_s = time.monotonic()
        self._tracer.add(self._lane, self._name, start_s=self._start_s, end_s=end_s, layer=self._layer, args=self._args)


def lane_seconds(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds of work per lane: the sum of its spans, those of parallel threads included."""
    total: dict[str, float] = {}
    for span in spans:
        if span.lane != MARK:
            total[span.lane] = total.get(span.lane, 0.0) + span.seconds
    return total


def stall_seconds(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds that the forward pass waited, by the stage it waited for: the name of each span in the lane "stall"."""
    total: dict[str, float] = {}
    for span in spans:
        if span.lane == "stall":
            total[span.name] = total.get(span.name, 0.0) + span.seconds
    return total


def busy_seconds(spans: Iterable[Span], lane: str) -> float:
    """Seconds in which at least one span of the lane was running."""
    return sum(stop - start for start, stop in _busy(spans, lane))


def overlap_seconds(spans: Iterable[Span], first: str, second: str) -> float:
    """Seconds in which both lanes were busy: what reading and computing at once has saved at most."""
    spans = tuple(spans)
    left, right = _busy(spans, first), _busy(spans, second)
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        total += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return total


def lane_rows(spans: Iterable[Span]) -> dict[str, list[list[Span]]]:
    """The spans of each lane, dealt to as few rows as they need so that no two in a row overlap.

    Lanes come in the order of `LANES`; a lane whose work never ran in parallel has one row. Marks are left out.
    """
    lanes: dict[str, list[list[Span]]] = {}
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        if span.lane == MARK:
            continue
        rows = lanes.setdefault(span.lane, [])
        row = next((row for row in rows if row[-1].end_s <= span.start_s), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return {lane: lanes[lane] for lane in lanes_in_order(lanes)}


def lanes_in_order(lanes: Iterable[str]) -> list[str]:
    """Known lanes as in `LANES`, the others behind them in the order given."""
    given = list(dict.fromkeys(lanes))
    return [lane for lane in LANES if lane in given] + [lane for lane in given if lane not in LANES]


def write_chrome_trace(
    spans: Sequence[Span], path: Path, *, origin_s: float, facts: Mapping[str, Value] | None = None
) -> None:
    """Write Chrome's trace event JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

    Each lane is a thread of its own; one whose spans overlap has further threads ("read 2"), since the format wants the
    events of a thread to be nested. Times are microseconds since `origin_s`. `facts` goes into "otherData". The file
    appears whole or not at all.

    Format: the "Trace Event Format" document of the Chromium project; phases X (complete), i (instant), M (metadata).
    """
    events = [_metadata("process_name", 0, {"name": "firstlayer"})]
    tid = 0
    for lane, rows in lane_rows(spans).items():
        for number, row in enumerate(rows, start=1):
            tid += 1
            events.append(_metadata("thread_name", tid, {"name": lane if number == 1 else f"{lane} {number}"}))
            events.append(_metadata("thread_sort_index", tid, {"sort_index": tid}))
            events += [_complete(span, tid, origin_s) for span in row]
    events += [_instant(span, origin_s) for span in spans if span.lane == MARK]
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(facts or {})}
    write_whole(path, json.dumps(trace, separators=(",", ":")))


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 text file by way of a temporary file beside it, so that no reader ever sees a part of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _busy(spans: Iterable[Span], lane: str) -> list[tuple[float, float]]:
    """The lane's time as intervals in order that neither touch nor overlap."""
    merged: list[tuple[float, float]] = []
    for start_s, end_s in sorted((span.start_s, span.end_s) for span in spans if span.lane == lane):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    return merged


def _complete(span: Span, tid: int, origin_s: float) -> dict[str, Any]:
    layer = {"layer": span.layer} if span.layer else {}
    return {
        "ph": "X", "pid": 1, "tid": tid, "cat": span.lane, "name": span.name,
        "ts": _microseconds(span.start_s - origin_s), "dur": _microseconds(span.seconds),
        "args": {**layer, **span.args},
    }  # fmt: skip


def _instant(span: Span, origin_s: float) -> dict[str, Any]:
    return {"ph": "i", "pid": 1, "tid": 0, "s": "p", "name": span.name, "ts": _microseconds(span.start_s - origin_s)}


def _metadata(name: str, tid: int, args: Mapping[str, Value]) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": tid, "name": name, "args": dict(args)}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)

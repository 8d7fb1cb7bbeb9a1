"""Draw the timeline of a trace that `--trace` wrote: on another machine, later, or cut to a part of it.

usage: python examples/plot_trace.py TRACE.json PICTURE.svg [--from SECONDS] [--to SECONDS]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from streaming.timeline import write_timeline
from streaming.trace import MARK, Span, lane_seconds, overlap_seconds


def spans_of(trace: Mapping[str, Any]) -> Iterator[Span]:
    """The spans and marks of a Chrome trace, in seconds since its origin."""
    for event in trace["traceEvents"]:
        start_s = event.get("ts", 0.0) / 1e6
        if event["ph"] == "X":
            args = dict(event["args"])
            layer = args.pop("layer", "")
            yield Span(event["cat"], event["name"], start_s, start_s + event["dur"] / 1e6, layer, args)
        elif event["ph"] == "i":
            yield Span(MARK, event["name"], start_s, start_s)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Draw the timeline of a trace.")
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--from", dest="start_s", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--to", dest="end_s", type=float, metavar="SECONDS")
    options = parser.parse_args(arguments)
    trace = json.loads(options.trace.read_text(encoding="utf-8"))
    spans = list(spans_of(trace))
    facts = {name: str(value) for name, value in trace["otherData"].items()}
    write_timeline(
        options.picture, spans, title=options.trace.name, facts=facts, origin_s=options.start_s, end_s=options.end_s
    )
    busy = ", ".join(f"{lane} {seconds:.3f} s" for lane, seconds in lane_seconds(spans).items())
    print(f"{busy}; reading and computing at once: {overlap_seconds(spans, 'read', 'forward'):.3f} s")


if __name__ == "__main__":
    main()

"""The files that a run can leave behind: a trace for Perfetto and a picture of the timeline."""

from __future__ import annotations

import argparse
from pathlib import Path

from streaming.clock import RunClock
from streaming.errors import OptionError
from streaming.sizes import format_size
from streaming.stats import Summary
from streaming.trace import Tracer, write_chrome_trace


def add_file_options(parser: argparse.ArgumentParser) -> None:
    """--trace and --timeline."""
    add = parser.add_argument_group("files").add_argument
    add("--trace", type=Path, metavar="FILE", help="write a trace that ui.perfetto.dev opens")
    add("--timeline", type=Path, metavar="FILE.svg", help="write a picture of the timeline")


def check_file_options(options: argparse.Namespace) -> None:
    """Refuse, before anything is read, files that cannot be written."""
    for name, path in (("--trace", options.trace), ("--timeline", options.timeline)):
        if path is not None:
            check_file_option(name, path)
    if options.timeline is not None:
        from streaming.timeline import check_timeline_path

        check_timeline_path(options.timeline)


def check_file_option(name: str, path: Path) -> None:
    """Refuse a path that no file can be written to."""
    if path.is_dir():
        raise OptionError(f"{name} {path}: is a folder; the name of a file is needed")
    if not path.absolute().parent.is_dir():
        raise OptionError(f"{name} {path}: the folder {path.absolute().parent} does not exist")


def write_run_files(options: argparse.Namespace, tracer: Tracer, clock: RunClock, summary: Summary) -> None:
    """Write what was asked for."""
    facts = run_facts(summary)
    if options.trace is not None:
        write_chrome_trace(tracer.spans(), options.trace, origin_s=clock.start_s, facts=dict(facts))
    if options.timeline is not None:
        from streaming.cli import load_options
        from streaming.timeline import write_timeline

        kept = load_options(options).quantization_words
        title = f"{options.model}: {kept} weights on {options.device}"
        write_timeline(options.timeline, tracer.spans(), title=title, facts=facts, origin_s=clock.start_s)


def run_facts(summary: Summary) -> dict[str, str]:
    """What stands below a picture's title."""
    seconds = {
        "first token": summary.ttft_s,
        "first layer ready": summary.first_layer_ready_s,
        "load done": summary.load_done_s,
    }
    facts = {name: f"{value:.2f} s" for name, value in seconds.items() if value is not None}
    return facts | {"read": format_size(summary.bytes_read), "kept": format_size(summary.bytes_kept)}

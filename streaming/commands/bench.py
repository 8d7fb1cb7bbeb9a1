"""`firstlayer bench`: cold and warm time to first token against the measured floor, in processes of their own."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layers.sampling_params import SamplingParams
from streaming import cli
from streaming.clock import RunClock
from streaming.commands.prompt_ids import seeded_ids
from streaming.errors import OptionError, WorkerError
from streaming.floor import evict, read_floor_s, warm
from streaming.llm import LLM
from streaming.options import LoadOptions
from streaming.prepare import prepare
from streaming.torch_import import import_torch

KEYS = ("ttft_s", "from_load_s", "import_s", "load_s", "forward_s", "decode_tok_s", "peak_rss_mb")
SAID = ("first_token_id", "load_format", "read_strategy", "read_strategy_reason")


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `bench` takes."""
    add = parser.add_argument_group("measurement").add_argument
    add("--rounds", type=int, default=1, metavar="N", help="of each state; medians are printed (default 1)")
    add("--state", default="both", choices=("cold", "warm", "both"), help="of the files in the page cache")
    add("--prompt-tokens", type=int, default=32, metavar="N", help="of the prompt (default 32)")
    add("--decode", type=int, default=0, metavar="N", help="decode this many more tokens and time them")
    add("--preimported", action="store_true", help="import torch first; nothing is read before the clock starts")
    add("--once", action="store_true", help="one run in this process, with the page cache as it is")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    for name in ("rounds", "prompt_tokens"):
        if getattr(options, name) < 1:
            raise OptionError(f"--{name.replace('_', '-')} {getattr(options, name)}: at least 1 is needed")
    found = run_once(options) if options.once else measure(options)
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.write("\n".join(_lines(found)) + "\n")
    return 0


def run_once(options: argparse.Namespace) -> dict[str, Any]:
    """One load and one prompt here and now."""
    clock = RunClock()
    if options.preimported:
        import_torch(whole=False)
        import streaming.model_run  # noqa: F401  (all that stands on torch)
        from streaming.warm_up import warm_up

        warm_up()
        clock.once("imports_done_s")
    prepared = prepare(options.model, cli.load_options(options))
    ids = seeded_ids(options.prompt_tokens, prepared.config.vocab_size)
    with LLM.start(prepared, clock=clock, leave=cli.leaver(options)) as llm:
        params = SamplingParams(max_tokens=1 + options.decode, ignore_eos=True)
        llm.complete([ids], params)
        llm.wait_loaded()
        summary = llm.stats().as_dict()
    return {key: value for key, value in summary.items() if key not in ("text", "token_ids")}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Floor, then the run, for each state and round, each run in a process of its own."""
    prepared = prepare(options.model, cli.load_options(options))
    files = sorted({file for file in prepared.checkpoint.files if isinstance(file, Path)})
    if len(files) != len(set(prepared.checkpoint.files)):
        raise OptionError(f"bench measures local files; {prepared.checkpoint.name} is not: use generate --json")
    states = ["cold", "warm"] if options.state == "both" else [options.state]
    rounds = [_round(options, files, state) for _ in range(options.rounds) for state in states]
    found = {state: _medians([r for r in rounds if r["state"] == state]) for state in states}
    return {"model": options.model, "preimported": options.preimported, **found[states[0]], **found, "rounds": rounds}


def _round(options: argparse.Namespace, files: Sequence[Path], state: str) -> dict[str, Any]:
    prepare_files = evict if state == "cold" else warm
    prepare_files(files)
    floor_s = read_floor_s(files) if files else None  # format dummy: nothing is read, so nothing to measure against
    prepare_files(files)
    done = subprocess.run(_once_command(options), capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().removeprefix("firstlayer bench: error: ")
        raise OptionError(said) if done.returncode == 2 else WorkerError(f"a run failed: {said or done.returncode}")
    return {"state": state, "floor_s": None if floor_s is None else round(floor_s, 4), **json.loads(done.stdout)}


def _once_command(options: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "streaming", "bench", options.model, "--once", "--json"]
    command += ["--prompt-tokens", str(options.prompt_tokens), "--decode", str(options.decode)]
    command += ["--preimported"] if options.preimported else []
    for source in options.sources:
        command += ["--source", source]
    for name in LoadOptions.__dataclass_fields__.keys() - {"sources"}:
        value = getattr(options, name)
        flag = f"--{name.replace('_', '-')}"
        command += [flag] if value is True else [flag, str(value)] if value else []
    return command


def _medians(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in ("floor_s", *KEYS):
        values = [r[key] for r in rounds if isinstance(r.get(key), (int, float))]
        if values:
            found[key] = statistics.median(values)
    for key in ("ttft_s", "from_load_s"):
        if key in found and "floor_s" in found:
            found[f"{key}_over_floor"] = round(found[key] / found["floor_s"], 3)
    return found | {key: rounds[-1].get(key) for key in SAID}


def _lines(found: dict[str, Any]) -> list[str]:
    if "rounds" not in found:
        return [f"{key}: {found[key]}" for key in KEYS if found.get(key) is not None]
    head = f"{'state':<6} {'floor s':>8} {'first token s':>14} {'/ floor':>8} {'from load s':>12} {'/ floor':>8}"
    lines = [head]
    for state in ("cold", "warm"):
        if state in found:
            row = found[state]
            lines.append(
                f"{state:<6} {_s(row, 'floor_s', 8)} {_s(row, 'ttft_s', 14)} {_s(row, 'ttft_s_over_floor', 8)} "
                f"{_s(row, 'from_load_s', 12)} {_s(row, 'from_load_s_over_floor', 8)}"
            )
    row = found["rounds"][0]
    return [*lines, f"{row['load_format']}, read with {row['read_strategy']}: {row['read_strategy_reason']}"]


def _s(row: Mapping[str, Any], key: str, width: int) -> str:
    """A number of the table; "-" where there is none (format dummy has no floor)."""
    return f"{row[key]:>{width}.2f}" if key in row else f"{'-':>{width}}"

"""`firstlayer generate`: the main job."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from layers.sampling_params import SamplingParams
from streaming import cli
from streaming.clock import RunClock
from streaming.commands.run_files import add_file_options, check_file_options, write_run_files
from streaming.commands.sampling_options import add_sampling_options, sampling_params
from streaming.errors import OptionError
from streaming.hooks import Hooks
from streaming.llm import LLM
from streaming.prepare import Prepared, prepare
from streaming.progress import Progress, Reached
from streaming.prompt import Prompt
from streaming.stats import Summary, summary_lines

_REACHED = {"read": Reached.READ, "quantize": Reached.QUANTIZED, "publish": Reached.READY}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `generate` takes."""
    add = parser.add_argument
    add("--prompt", action="append", metavar="TEXT", help="may be given several times: they share the load")
    add("--ids", action="append", metavar="1,2,3", help="a prompt as token ids; needs no tokenizer")
    add("--prompt-file", type=Path, metavar="FILE", help="a prompt from a file")
    add("--chat", action="store_true", help="put each prompt into the model's chat template")
    add_sampling_options(parser, max_tokens=64)
    add_file_options(parser)


def run(options: argparse.Namespace) -> int:
    """Generate, print, summarize."""
    clock = RunClock()
    params = sampling_params(options)
    check_file_options(options)
    prompts = given_prompts(options)
    prepared = prepare(options.model, cli.load_options(options))
    progress = make_progress(options, prepared)
    with LLM.start(prepared, clock=clock, hooks=progress_hooks(progress), leave=cli.leaver(options)) as llm:
        progress.show_ranks(llm.rank_progress)
        asked = [llm.chat_prompt([{"role": "user", "content": str(p)}]) for p in prompts] if options.chat else prompts
        try:
            _print_pieces(llm, asked, options, progress, params)
        finally:
            progress.close()
        llm.wait_loaded()
        summary = llm.stats()
        _report(llm, options, summary)
        write_run_files(options, llm.tracer, clock, summary)
    return 0


def given_prompts(options: argparse.Namespace) -> list[Prompt]:
    """The prompts of the command line. Raises OptionError when there is none, or ids with --chat."""
    prompts: list[Prompt] = list(options.prompt or [])
    if options.prompt_file is not None:
        try:
            prompts.append(options.prompt_file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise OptionError(f"--prompt-file {options.prompt_file}: is not UTF-8 text ({error.reason})") from error
    prompts += [cli.parse_ids(text) for text in options.ids or []]
    if not prompts:
        raise OptionError("generate needs --prompt TEXT, --prompt-file FILE or --ids 1,2,3")
    if options.chat and options.ids:
        raise OptionError("--chat takes text, not --ids")
    return prompts


def make_progress(options: argparse.Namespace, prepared: Prepared) -> Progress:
    """The live lines on stderr."""
    layers = [layer.name for layer in prepared.plan.all_layers]
    return Progress(sys.stderr, layers=layers, enabled=not (options.quiet or options.json))


def progress_hooks(progress: Progress) -> Hooks:
    """Hooks that draw what happens, warnings included."""

    def tell(layer: str, stage: str, nbytes: int, seconds: float) -> None:
        progress.update(layer, _REACHED[stage], nbytes=nbytes, seconds=seconds)

    return Hooks(warn=lambda text: progress.note(f"warning: {text}"), on_stage=tell)


def _print_pieces(
    llm: LLM, prompts: Sequence[Prompt], options: argparse.Namespace, progress: Progress, params: SamplingParams
) -> None:
    silent, shown = options.json, -1
    if len(prompts) > 1 and not silent:
        completions = llm.complete(prompts, params)
        progress.text_begins()
        for completion in completions:
            _write(f"[{completion.index + 1}] {completion.text or _ids(completion.token_ids)}\n")
        return
    for piece in llm.pieces(prompts, params):
        if silent:
            continue
        if shown < 0:
            progress.text_begins()
            shown = 0
        _write(piece.text if llm.has_tokenizer else f"{piece.token_id} ")
    if not silent:
        _write("\n")


def _ids(token_ids: Sequence[int]) -> str:
    return ",".join(map(str, token_ids))


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _report(llm: LLM, options: argparse.Namespace, summary: Summary) -> None:
    if options.json:
        _write(json.dumps(json_summary(llm, summary)) + "\n")
    elif not options.quiet:
        sys.stderr.write("\n".join(["", *summary_lines(summary)]) + "\n")


def json_summary(llm: LLM, summary: Summary) -> dict[str, object]:
    """The summary, and every answer where there are several."""
    found = summary.as_dict()
    if len(llm.completions) > 1:
        found["completions"] = [
            {"index": c.index, "token_ids": list(c.token_ids), "text": c.text, "finish_reason": c.finish_reason}
            for c in llm.completions
        ]
    return found

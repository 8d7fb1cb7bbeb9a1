"""`firstlayer generate`: the main job."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from layers.sampling_params import SamplingParams
from streaming import cli
from streaming.clock import RunClock
from streaming.commands.run_files import add_file_options, check_file_options, write_run_files
from streaming.commands.sampling_options import add_sampling_options, sampling_params
from streaming.draft_plan import prepare_with_draft
from streaming.errors import OptionError
from streaming.hooks import Hooks
from streaming.llm import LLM
from streaming.prepare import Prepared
from streaming.progress import Progress, Reached
from streaming.prompt import Prompt
from streaming.stats import Summary, summary_lines

if TYPE_CHECKING:
    from streaming.answers import Completion

_REACHED = {"read": Reached.READ, "quantize": Reached.QUANTIZED, "publish": Reached.READY}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `generate` takes."""
    add = parser.add_argument
    add("--prompt", action="append", metavar="TEXT", help="may be given several times: they share the load")
    add("--ids", action="append", metavar="1,2,3", help="a prompt as token ids; needs no tokenizer")
    add("--prompt-file", type=Path, metavar="FILE", help="a prompt from a file")
    add("--prompts", type=Path, metavar="FILE", help="many: a line each (.txt), or JSON Lines with prompt or "
        "ids, and max_tokens (.jsonl)")  # fmt: skip
    add("--chat", action="store_true", help="put each prompt into the model's chat template")
    add_sampling_options(parser, max_tokens=64)
    add_file_options(parser)


def run(options: argparse.Namespace) -> int:
    """Generate, print, summarize."""
    clock = RunClock()
    params = sampling_params(options)
    check_file_options(options)
    prompts, each = asked_prompts(options, params)
    prepared, draft = prepare_with_draft(options.model, cli.load_options(options), draft_model=options.draft_model)
    if options.prompts is not None:
        _check_file(prompts, options.prompts, prepared)
    progress = make_progress(options, prepared)
    hooks, leave = progress_hooks(progress), cli.leaver(options)
    with LLM.start(prepared, clock=clock, hooks=hooks, leave=leave, draft=draft) as llm:
        progress.show_ranks(llm.rank_progress)
        asked = _as_asked(llm, prompts, options)
        try:
            _print_answers(llm, asked, options, progress, each)
        finally:
            progress.close()
        llm.wait_loaded()
        summary = llm.stats()
        _report(llm, options, summary)
        write_run_files(options, llm.tracer, clock, summary)
    return 0


def asked_prompts(
    options: argparse.Namespace, params: SamplingParams
) -> tuple[list[Prompt], SamplingParams | list[SamplingParams]]:
    """The prompts of the command line, or of its file, and the params of all or of each. Raises OptionError."""
    prompts = given_prompts(options)
    return (prompts, params) if options.prompts is None else prompts_of_file(options, params)


def given_prompts(options: argparse.Namespace) -> list[Prompt]:
    """The prompts of the command line itself. Raises OptionError when there is none and no file, or ids with --chat."""
    prompts: list[Prompt] = list(options.prompt or [])
    if options.prompt_file is not None:
        try:
            prompts.append(options.prompt_file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise OptionError(f"--prompt-file {options.prompt_file}: is not UTF-8 text ({error.reason})") from error
    prompts += [cli.parse_ids(text) for text in options.ids or []]
    if prompts and options.prompts is not None:
        raise OptionError("--prompts FILE does not go with --prompt, --prompt-file or --ids: put all into the file")
    if not prompts and options.prompts is None:
        raise OptionError("generate needs --prompt TEXT, --prompt-file FILE, --ids 1,2,3 or --prompts FILE")
    if options.chat and options.ids:
        raise OptionError("--chat takes text, not --ids")
    return prompts


def prompts_of_file(options: argparse.Namespace, params: SamplingParams) -> tuple[list[Prompt], list[SamplingParams]]:
    """The prompts of --prompts, each with its own params. Raises OptionError."""
    from streaming.prompt_file import read_prompt_file

    found = read_prompt_file(options.prompts)
    if options.chat and any(not isinstance(one.prompt, str) for one in found):
        raise OptionError(f"--chat takes text, and --prompts {options.prompts} holds ids")
    each = [
        replace(
            params,
            max_tokens=params.max_tokens if one.max_tokens is None else one.max_tokens,
            seed=None if params.seed is None else params.seed + index,
        )
        for index, one in enumerate(found)
    ]
    return [one.prompt for one in found], each


def _check_file(prompts: Sequence[Prompt], path: Path, prepared: Prepared) -> None:
    from streaming.prompt_file import check_ids

    context = prepared.options.max_model_len or prepared.config.max_position_embeddings
    check_ids(prompts, path, vocab_size=prepared.config.vocab_size, context_length=context)


def _as_asked(llm: LLM, prompts: list[Prompt], options: argparse.Namespace) -> list[Prompt]:
    """The prompts in the model's chat template, where that is wanted; those of a file as token ids."""

    def encode(text: str) -> list[int]:
        if options.chat:
            return llm.chat_prompt([{"role": "user", "content": text}])
        return llm.tokenizer.encode(text, add_special_tokens=True)

    if options.prompts is not None:
        from streaming.prompt_file import encode_prompts

        return encode_prompts(prompts, options.prompts, encode=encode, context_length=llm.model.context_length)
    return [encode(str(prompt)) for prompt in prompts] if options.chat else prompts


def make_progress(options: argparse.Namespace, prepared: Prepared) -> Progress:
    """The live lines on stderr."""
    layers = [layer.name for layer in prepared.plan.all_layers]
    return Progress(sys.stderr, layers=layers, enabled=not (options.quiet or options.json))


def progress_hooks(progress: Progress) -> Hooks:
    """Hooks that draw what happens, warnings included."""

    def tell(layer: str, stage: str, nbytes: int, seconds: float) -> None:
        progress.update(layer, _REACHED[stage], nbytes=nbytes, seconds=seconds)

    return Hooks(warn=lambda text: progress.note(f"warning: {text}"), on_stage=tell)


def _print_answers(
    llm: LLM,
    prompts: Sequence[Prompt],
    options: argparse.Namespace,
    progress: Progress,
    params: SamplingParams | Sequence[SamplingParams],
) -> None:
    if len(prompts) > 1 and not options.json:
        _print_in_order(llm.answers(prompts, params), progress)
        return
    silent, shown = options.json, -1
    for piece in llm.pieces(prompts, params):
        if silent:
            continue
        if shown < 0:
            progress.text_begins()
            shown = 0
        _write(piece.text if llm.has_tokenizer else f"{piece.token_id} ")
    if not silent:
        _write("\n")


def _print_in_order(answers: Iterator[Completion], progress: Progress) -> None:
    """Each as soon as it and all before it are there."""
    ended: dict[int, Completion] = {}
    following = 0
    for answer in answers:
        ended[answer.index] = answer
        while (found := ended.pop(following, None)) is not None:
            if not following:
                progress.text_begins()
            following += 1
            _write(f"[{following}] {found.text or _ids(found.token_ids)}\n")


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
    if len(llm.completions) > 1:  # in the order in which they were asked
        found["completions"] = [
            {"index": c.index, "token_ids": list(c.token_ids), "text": c.text, "finish_reason": c.finish_reason}
            for c in sorted(llm.completions, key=lambda completion: completion.index)
        ]
    return found

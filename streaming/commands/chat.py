"""`firstlayer chat`: a conversation; the first question can be typed while the model still loads."""

from __future__ import annotations

import argparse
import sys

from streaming import cli
from streaming.clock import RunClock
from streaming.commands.generate import make_progress, progress_hooks
from streaming.commands.run_files import add_file_options, check_file_options, write_run_files
from streaming.commands.sampling_options import add_sampling_options, sampling_params
from streaming.draft_plan import prepare_with_draft
from streaming.errors import OptionError
from streaming.llm import LLM
from streaming.stats import summary_lines


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `chat` takes."""
    parser.add_argument("--system", metavar="TEXT", help="instructions before the conversation")
    add_sampling_options(parser, max_tokens=512)
    add_file_options(parser)


def run(options: argparse.Namespace) -> int:
    """Ask and answer until the input ends."""
    if options.json:
        raise OptionError("chat has no --json: use generate --chat --json")
    clock, params = RunClock(), sampling_params(options)
    check_file_options(options)
    prepared, draft = prepare_with_draft(options.model, cli.load_options(options), draft_model=options.draft_model)
    progress = make_progress(options, prepared)
    messages = [{"role": "system", "content": options.system}] if options.system else []
    hooks, leave = progress_hooks(progress), cli.leaver(options)
    with LLM.start(prepared, clock=clock, hooks=hooks, leave=leave, draft=draft) as llm:
        progress.show_ranks(llm.rank_progress)
        progress.close()  # the prompt takes its place: both would write where the cursor stands
        if not llm.has_tokenizer:
            _ = llm.tokenizer  # says so, before anybody types
        while (text := _ask()) is not None:
            if not text:
                continue
            messages.append({"role": "user", "content": text})
            answer = ""
            for piece in llm.generate(llm.chat_prompt(messages), params):
                answer += piece
                sys.stdout.write(piece)
                sys.stdout.flush()
            sys.stdout.write("\n")
            messages.append({"role": "assistant", "content": answer})
        summary = llm.stats()
        write_run_files(options, llm.tracer, clock, summary)
    if not options.quiet:
        sys.stderr.write("\n".join(summary_lines(summary)) + "\n")
    return 0


def _ask() -> str | None:
    """A line of input; None at its end or for /exit."""
    if sys.stdin.isatty():
        sys.stdout.write("> ")
        sys.stdout.flush()
    line = sys.stdin.readline()
    return None if not line or line.strip() == "/exit" else line.strip()

"""The options of a generation, shared by `generate` and `chat`."""

from __future__ import annotations

import argparse

from layers.sampling_params import SamplingParams
from streaming.errors import OptionError

DRAFTED = 4  # tokens that a draft model proposes, where --speculate does not say


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """--max-tokens, --temperature and their like."""
    add = parser.add_argument_group("sampling").add_argument
    add("--max-tokens", type=int, default=max_tokens, metavar="N", help=f"of the answer (default {max_tokens})")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (the default) takes the likeliest token")
    add("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest tokens; 0: all")
    add("--top-p", type=float, default=1.0, metavar="P", help="keep the likeliest tokens that reach P together")
    add("--min-p", type=float, default=0.0, metavar="P", help="keep tokens at least P times as likely as the likeliest")
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1: less likely to repeat")
    add("--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be given several times")
    add("--ignore-eos", action="store_true", help="go on behind the model's own end")
    add("--speculate", type=int, metavar="K", help="guess up to K tokens and check them in one pass: the same greedy "
        "answer in fewer passes; guessed from the text before, or by a draft model")  # fmt: skip
    add("--draft-model", metavar="MODEL", help=f"a small model with the same tokenizer guesses ({DRAFTED} tokens)")


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """The options as a value. Raises OptionError naming the option and its range."""
    try:
        speculate = _speculate(options)
        return SamplingParams(
            max_tokens=options.max_tokens, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p,
            min_p=options.min_p, repetition_penalty=options.repetition_penalty, seed=options.seed,
            stop=tuple(options.stop), ignore_eos=options.ignore_eos,
            speculate=speculate,
        )  # fmt: skip
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(str(error)) from error


def _speculate(options: argparse.Namespace) -> int:
    count: int | None = options.speculate
    if options.draft_model is None:
        return 0 if count is None else count
    if options.temperature != 0:
        raise OptionError(
            f"--draft-model {options.draft_model} does not go with --temperature {options.temperature:g}: what it "
            "guesses is checked against the likeliest token (--temperature 0)"
        )
    if count == 0:
        raise OptionError(f"--draft-model {options.draft_model} guesses nothing with --speculate 0: leave one out")
    return DRAFTED if count is None else count

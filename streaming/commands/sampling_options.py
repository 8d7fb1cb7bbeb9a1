"""The options of a generation, shared by `generate` and `chat`."""

from __future__ import annotations

import argparse

from layers.sampling_params import SamplingParams
from streaming.errors import OptionError


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


def sampling_params(options: argparse.Namespace) -> SamplingParams:
    """The options as a value. Raises OptionError naming the option and its range."""
    try:
        return SamplingParams(
            max_tokens=options.max_tokens, temperature=options.temperature, top_k=options.top_k, top_p=options.top_p,
            min_p=options.min_p, repetition_penalty=options.repetition_penalty, seed=options.seed,
            stop=tuple(options.stop), ignore_eos=options.ignore_eos,
        )  # fmt: skip
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(str(error)) from error

"""`firstlayer logits`: float32 logits of every position, for checks by other programs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from streaming import cli
from streaming.commands.generate import make_progress, progress_hooks
from streaming.commands.run_files import check_file_option
from streaming.commands.whole_output import whole_output
from streaming.llm import LLM
from streaming.prepare import prepare


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `logits` takes."""
    parser.add_argument("--ids", required=True, metavar="1,2,3", help="the prompt as token ids")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.npy", help="float32 [tokens, vocabulary]")


def run(options: argparse.Namespace) -> int:
    """Write the array."""
    ids = cli.parse_ids(options.ids)
    check_file_option("--out", options.out)
    prepared = prepare(options.model, cli.load_options(options))
    progress = make_progress(options, prepared)
    with LLM.start(prepared, hooks=progress_hooks(progress), leave=cli.leaver(options)) as llm:
        progress.show_ranks(llm.rank_progress)
        try:
            logits = llm.logits(ids)
            llm.wait_loaded()
        finally:
            progress.close()
        import numpy

        with whole_output(options.out) as file:  # numpy would add .npy to another name
            numpy.save(file, logits.numpy(force=True))
        found = {"out": str(options.out), "shape": list(logits.shape), "argmax_last": int(logits[-1].argmax())}
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
    elif not options.quiet:
        sys.stderr.write(f"{options.out}: float32 {found['shape']}, likeliest next token {found['argmax_last']}\n")
    return 0

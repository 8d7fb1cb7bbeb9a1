"""`firstlayer quantize`: a checkpoint that others read, in the compressed-tensors layout, layer by layer."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from streaming import cli
from streaming.budget import Budget
from streaming.commands.generate import make_progress, progress_hooks
from streaming.commands.weights_only import check_weights_only
from streaming.errors import OptionError
from streaming.interrupts import interrupt_kept
from streaming.new_folder import check_room
from streaming.prepare import Prepared, prepare
from streaming.quantized_folder import FolderPlan, plan_folder
from streaming.quantized_writer import check_out, layer_budget, write_folder
from streaming.sizes import format_size, parse_size
from streaming.torch_import import import_torch

MAX_SHARD = "5GB"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `quantize` takes."""
    parser.add_argument("out", type=Path, metavar="OUT", help="a new or empty folder")
    parser.add_argument(
        "--max-shard-size", default=MAX_SHARD, metavar="SIZE", help=f"of a safetensors file ({MAX_SHARD})"
    )


def run(options: argparse.Namespace) -> int:
    """Plan, refuse what cannot be, write."""
    max_shard_nbytes = parse_size(options.max_shard_size, option="--max-shard-size")
    asked = cli.load_options(options)
    check_weights_only(asked, command="quantize")
    check_out(options.out)
    prepared = prepare(options.model, asked.within_memory(None))  # of the model one layer is held, not the whole
    if options.out.resolve() == prepared.checkpoint.root.resolve():
        raise OptionError(f"OUT {options.out}: is the model's own folder")
    folder = plan_folder(prepared, max_shard_nbytes=max_shard_nbytes)
    budget = layer_budget(prepared, folder, limit_nbytes=asked.memory_nbytes)
    check_room(options.out, folder.nbytes, option="OUT")
    _write(options, prepared, folder)
    _say(options, prepared, folder, budget)
    return 0


def _write(options: argparse.Namespace, prepared: Prepared, folder: FolderPlan) -> None:
    with interrupt_kept(cli.leaver(options)):  # nothing is written yet
        import_torch(whole=True)
    progress = make_progress(options, prepared)
    try:
        for warning in prepared.warnings:
            progress.note(f"warning: {warning}")
        write_folder(prepared, folder, options.out, hooks=progress_hooks(progress))
    finally:
        progress.close()


def _say(options: argparse.Namespace, prepared: Prepared, folder: FolderPlan, budget: Budget) -> None:
    if prepared.checkpoint.metadata and not options.quiet:
        cli.warn("a GGUF's tokenizer has no files of its own: none was written")
    files = [file.name for file in folder.files]
    if options.json:
        found = {
            "out": str(options.out), "quantization": prepared.options.quantization_words, "format": folder.format,
            "dtype": prepared.dtype.torch_name, "bytes_read": prepared.plan.read_nbytes, "bytes_written": folder.nbytes,
            "peak_bytes": budget.peak_nbytes, "files": files,
        }  # fmt: skip
        sys.stdout.write(json.dumps(found) + "\n")
        return
    count = f"{len(files)} file{'s' * (len(files) > 1)}"
    cli.write_lines([f"{options.out}: {format_size(folder.nbytes)} in {count}, {folder.format} (compressed-tensors)"])

"""`firstlayer save-shards`: load once, keep what is stored: later loads read it straight to its place."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from streaming import cli
from streaming.commands.generate import make_progress, progress_hooks
from streaming.commands.weights_only import check_weights_only
from streaming.errors import OptionError
from streaming.llm import LLM
from streaming.new_folder import check_room
from streaming.prepare import Prepared, prepare
from streaming.sharded import Manifest
from streaming.sharded_writer import holds_same, wanted_manifest, writing
from streaming.sizes import format_size


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `save-shards` takes."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new or empty folder")


def run(options: argparse.Namespace) -> int:
    """Load and write."""
    asked = cli.load_options(options)
    check_weights_only(asked, command="save-shards")
    prepared = prepare(options.model, asked)
    if options.out.resolve() == prepared.checkpoint.root.resolve():
        raise OptionError(f"--out {options.out}: is the model's own folder")
    wanted = wanted_manifest(prepared)
    if holds_same(options.out, wanted):
        _say(options, prepared, wanted, written=False)
        return 0
    check_room(options.out, prepared.plan.kept_nbytes, option="--out")
    manifest = _save(options, prepared, wanted)
    _say(options, prepared, manifest, written=True)
    return 0


def _save(options: argparse.Namespace, prepared: Prepared, wanted: Manifest) -> Manifest:
    progress = make_progress(options, prepared)
    try:
        with writing(prepared, options.out, wanted) as writer:
            with LLM.start(replace(prepared, post_process=False), hooks=progress_hooks(progress)) as llm:
                manifest = llm.call(lambda runner, stop: writer.write(runner, stop=stop))
                llm.wait_loaded()
            return manifest
    finally:
        progress.close()


def _say(options: argparse.Namespace, prepared: Prepared, manifest: Manifest, *, written: bool) -> None:
    found = {
        "out": str(options.out), "written": written, "quantization": manifest.schemes, "dtype": manifest.dtype,
        "bytes_read": prepared.plan.read_nbytes if written else 0, "bytes_kept": prepared.plan.kept_nbytes,
        "files": [file.name for file in manifest.files],
    }  # fmt: skip
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    kept = format_size(prepared.plan.kept_nbytes)
    done = "written" if written else "holds the same already"
    sys.stdout.write(f"{options.out}: {kept} in {manifest.schemes} ({manifest.dtype}): {done}\n")

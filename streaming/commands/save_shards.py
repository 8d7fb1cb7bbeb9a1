"""`firstlayer save-shards`: load once, keep what is stored: later loads read it straight to its place."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from streaming import cli
from streaming.commands.generate import progress_hooks
from streaming.commands.weights_only import check_weights_only
from streaming.cores import core_count
from streaming.errors import OptionError
from streaming.interrupts import interrupt_kept
from streaming.new_folder import check_room
from streaming.options import LoadOptions
from streaming.prepare import Prepared, prepare
from streaming.progress import Progress
from streaming.sharded import Manifest
from streaming.sharded_writer import Ranks, check_memory, holds_same, layers_of, wanted_manifest, writing
from streaming.sizes import format_size
from streaming.torch_import import import_torch

# What has no meaning where one process reads one layer of each rank at a time.
_REFUSED = {
    "read_sharing": "loads every rank in one process",
    "rank_timeout": "loads every rank in one process",
    "remote_cache": "reads a layer at a time and keeps no copy of a file",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `save-shards` takes."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new or empty folder")


def run(options: argparse.Namespace) -> int:
    """Load and write."""
    asked = cli.load_options(options)
    check_weights_only(asked, command="save-shards")
    _check_reading(asked)
    ranks = tuple(_plans(options.model, asked))
    if options.out.resolve() == ranks[0].checkpoint.root.resolve():
        raise OptionError(f"--out {options.out}: is the model's own folder")
    wanted = wanted_manifest(ranks)
    if holds_same(options.out, wanted):
        _say(options, ranks, wanted, written=False)
        return 0
    check_memory(ranks, limit_nbytes=asked.memory_nbytes)
    check_room(options.out, _kept_nbytes(ranks), option="--out")
    manifest = _save(options, ranks, wanted)
    _say(options, ranks, manifest, written=True)
    return 0


def _check_reading(asked: LoadOptions) -> None:
    for name, words in _REFUSED.items():
        if (value := getattr(asked, name)) != LoadOptions.__dataclass_fields__[name].default:
            raise OptionError(f"--{name.replace('_', '-')} {value}: save-shards {words}; leave it out")
    if asked.safetensors_load_strategy == "eager":
        raise OptionError(
            "--safetensors-load-strategy eager: save-shards reads a layer at a time, and would read whole files for "
            "each; leave it out"
        )


def _plans(model: str, asked: LoadOptions) -> Iterator[Prepared]:
    """The load of every rank; those that are loaded together share the cores. Of the model single layers are held, so
    the memory of a whole load is not asked for."""
    topology = asked.topology()
    cores = core_count()
    threads = asked.threads or (None if topology.tensor == 1 else max(1, cores // topology.tensor))
    options = replace(asked.within_memory(None), threads=threads)
    return (prepare(model, options, rank=rank) for rank in range(topology.world))


def _save(options: argparse.Namespace, ranks: Ranks, wanted: Manifest) -> Manifest:
    with interrupt_kept(cli.leaver(options)):  # nothing is written yet
        import_torch(whole=True)
    progress = Progress(sys.stderr, layers=layers_of(ranks), enabled=not (options.quiet or options.json))
    try:
        for warning in dict.fromkeys(warning for prepared in ranks for warning in prepared.warnings):
            progress.note(f"warning: {warning}")
        with writing(ranks, options.out, wanted, hooks=progress_hooks(progress)) as writer:
            return writer.write()
    finally:
        progress.close()


def _kept_nbytes(ranks: Ranks) -> int:
    return sum(prepared.plan.kept_nbytes for prepared in ranks)


def _say(options: argparse.Namespace, ranks: Ranks, manifest: Manifest, *, written: bool) -> None:
    read = sum(prepared.plan.read_nbytes for prepared in ranks)
    found = {
        "out": str(options.out), "written": written, "quantization": manifest.schemes, "dtype": manifest.dtype,
        "bytes_read": read if written else 0, "bytes_kept": _kept_nbytes(ranks), "ranks": len(ranks),
        "files": [file.name for file in manifest.files],
    }  # fmt: skip
    if options.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    kept = format_size(_kept_nbytes(ranks))
    mesh = "" if len(ranks) == 1 else f" for {len(ranks)} ranks ({manifest.topology})"
    done = "written" if written else "holds the same already"
    sys.stdout.write(f"{options.out}: {kept} in {manifest.schemes} ({manifest.dtype}){mesh}: {done}\n")

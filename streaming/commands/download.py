"""`firstlayer download`: what a load would fetch, fetched beforehand; prints the folder (or file) that has it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from streaming.checkpoint.formats import check_load_format
from streaming.checkpoint.hub import is_offline
from streaming.checkpoint.hub_folder import WORK
from streaming.checkpoint.hub_location import fetch, fetch_into, hub_id, uses_modelscope
from streaming.checkpoint.location import DEMO, locate
from streaming.commands.transfer_line import with_line
from streaming.errors import OptionError
from streaming.remote.address import is_address


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `download` takes; nothing of loading but what decides which files are needed."""
    parser.add_argument("model", metavar="MODEL", help="a hub id owner/name[/file.gguf or :QUANTIZATION][@revision]")
    parser.add_argument("--revision", metavar="REV", help="a branch, a tag or a commit")
    parser.add_argument("--load-format", default="auto", metavar="FORMAT", help="fetch what this format reads")
    parser.add_argument("--local-dir", type=Path, metavar="DIR", help="into this folder, not into the hub's cache")


def run(options: argparse.Namespace) -> int:
    """Fetch, and say where it is."""
    check_load_format(options.load_format)
    name, revision, load_format = options.model, options.revision, options.load_format
    if (what := _nothing_to_fetch(name)) is not None or load_format == "remote":
        what = what or f"format {load_format}"
        raise OptionError(f"download fetches hub ids, owner/name[@revision]; there is nothing to fetch for {what}")
    model, folder = hub_id(name, revision=revision), options.local_dir
    if folder is not None:
        _check_folder(folder)
        path, fetched_nbytes = with_line(
            options, lambda tell: fetch_into(folder, model, load_format=load_format, tell=tell)
        )
    elif is_offline() or uses_modelscope():
        path, fetched_nbytes = locate(name, revision=revision, load_format=load_format), None
    else:
        path, fetched_nbytes = with_line(options, lambda tell: fetch(model, load_format=load_format, tell=tell))
    if options.json:
        files = _files(path)
        found = {
            "model": model.repo, "revision": model.revision, "path": str(path), "bytes": sum(files.values()),
            "bytes_fetched": fetched_nbytes, "files": files,
        }  # fmt: skip
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.write(f"{path}\n")
    return 0


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"--local-dir {folder}: is a file; the name of a folder is needed")
    if uses_modelscope():
        raise OptionError("--local-dir goes with the Hugging Face hub; FIRSTLAYER_USE_MODELSCOPE asks another one")


def _nothing_to_fetch(name: str) -> str | None:
    """What the model is called that is here already, or is never fetched as a whole; None for what may be a hub id."""
    if name == DEMO:
        return "the demo package's model"
    if os.path.lexists(name):
        return f"{name}: a path that exists"
    return f"{name}: an address (a load with --remote-cache keeps its files)" if is_address(name) else None


def _files(path: Path) -> dict[str, int]:
    """Name -> size in bytes of each file that is there."""
    if path.is_file():
        return {path.name: path.stat().st_size}
    files = sorted(file for file in path.rglob("*") if file.is_file() and WORK not in file.parts)
    return {str(file.relative_to(path)): file.stat().st_size for file in files}

"""`firstlayer inspect --part encoder`: the tensors of a multimodal model's vision tower and projector, by headers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import PurePath

from streaming import cli
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.encoder_files import open_encoder_files
from streaming.errors import OptionError
from streaming.options import LoadOptions
from streaming.sizes import format_size

_TAKEN = ("load_format", "revision", "remote_cache")


def list_encoder(options: argparse.Namespace) -> int:
    """Print one line for each tensor, and which files need not be opened."""
    check_options(options)
    checkpoint = open_encoder_files(
        options.model,
        load_format=options.load_format,
        revision=options.revision,
        remote_cache=cli.load_options(options).remote_cache,
    )
    if options.json:
        sys.stdout.write(json.dumps(_as_dict(checkpoint)) + "\n")
    else:
        cli.write_lines(_lines(checkpoint))
    for note in checkpoint.notes:
        cli.warn(note)
    return 0


def check_options(options: argparse.Namespace) -> None:
    """Refuse what is of the language part: nothing of it is opened here. Raises OptionError."""
    given = cli.load_options(options)
    usual = LoadOptions()
    names = [name for name in LoadOptions.__dataclass_fields__ if name not in _TAKEN]
    flags = [
        "--source" if name == "sources" else f"--{name.replace('_', '-')}"
        for name in names
        if getattr(given, name) != getattr(usual, name)
    ]
    flags += ["--layer"] * (options.layer is not None) + ["--files"] * options.files
    if flags:
        taken = ", ".join(f"--{name.replace('_', '-')}" for name in _TAKEN)
        raise OptionError(f"{flags[0]} does not go with --part encoder, which takes {taken}")


def _as_dict(checkpoint: Checkpoint) -> dict[str, object]:
    return {
        "model": checkpoint.name, "part": "encoder", "bytes": checkpoint.nbytes,
        "tensors": [
            {"name": info.name, "shape": list(info.shape), "dtype": info.dtype.value, "file": str(info.file),
             "bytes": info.nbytes}
            for info in checkpoint.tensors.values()
        ],
        "unopened": [{"name": str(file.file), "tensors": len(file.reasons)} for file in checkpoint.unopened],
    }  # fmt: skip


def _lines(checkpoint: Checkpoint) -> Iterator[str]:
    for info in checkpoint.tensors.values():
        yield _line(info)
    files = len(checkpoint.files)
    yield (
        f"encoder: {len(checkpoint.tensors):,} tensors, {format_size(checkpoint.nbytes)}, "
        f"in {files} file{'s' if files != 1 else ''}"
    )
    for file in checkpoint.unopened:
        yield f"{_short(file.file)}: not opened, its {len(file.reasons):,} tensors are of the language part"


def _line(info: TensorInfo) -> str:
    return f"{info.name} {info.dtype.value} {list(info.shape)} {_short(info.file)} {info.nbytes:,} bytes"


def _short(file: object) -> str:
    return PurePath(str(file)).name

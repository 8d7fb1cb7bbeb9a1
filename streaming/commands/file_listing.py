"""`firstlayer inspect --files`: files, tensors and bytes by dtype of any checkpoint, whatever its architecture."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from streaming import cli
from streaming.checkpoint.account import Account, Amount, add_up, make_account
from streaming.checkpoint.tensors import Checkpoint
from streaming.prepare import open_model
from streaming.sizes import format_size


def list_files(options: argparse.Namespace) -> int:
    """Print the account of what is on disk; the configuration is not read for more than being there."""
    checkpoint = open_model(options.model, cli.load_options(options))
    account = make_account(checkpoint)
    if options.json:
        sys.stdout.write(json.dumps(_as_dict(checkpoint, account)) + "\n")
    else:
        cli.write_lines(_lines(checkpoint, account))
    for note in checkpoint.notes:
        cli.warn(note)
    return 0


def _as_dict(checkpoint: Checkpoint, account: Account) -> dict[str, object]:
    return {
        "model": checkpoint.name, "format": checkpoint.format, "model_type": checkpoint.config.get("model_type"),
        "tensors": account.total.tensors, "bytes": account.total.nbytes, "dtypes": _amounts(account.by_form),
        "files": [
            {"name": name, "tensors": add_up(forms.values()).tensors, "bytes": add_up(forms.values()).nbytes,
             "dtypes": _amounts(forms)}
            for name, forms in account.by_file.items()
        ],
        "unopened": [
            {"name": str(file.file), "tensors": len(file.reasons), "file_bytes": file.nbytes}
            for file in checkpoint.unopened
        ],
    }  # fmt: skip


def _amounts(forms: Mapping[str, Amount]) -> dict[str, dict[str, int]]:
    return {form: {"tensors": amount.tensors, "bytes": amount.nbytes} for form, amount in forms.items()}


def _lines(checkpoint: Checkpoint, account: Account) -> Iterator[str]:
    kind = checkpoint.config.get("model_type") or "no model_type"
    files = len(account.by_file)
    yield f"{checkpoint.name}: {checkpoint.format}, {kind}, {files} file{'s' if files != 1 else ''}"
    width = max(len("total"), *(len(name) for name in _short_names(account)))
    yield f"{'file':<{width}} {'tensors':>8} {'size':>11}  of that"
    for name, forms in zip(_short_names(account), account.by_file.values(), strict=True):
        yield _line(name, forms, width)
    yield _line("total", account.by_form, width)
    for file in checkpoint.unopened:
        yield f"{file.file.name}: not opened, none of its {len(file.reasons):,} tensors is used"


def _short_names(account: Account) -> list[str]:
    return [PurePath(name).name for name in account.by_file]


def _line(name: str, forms: Mapping[str, Amount], width: int) -> str:
    total = add_up(forms.values())
    parts = ", ".join(f"{form} {format_size(amount.nbytes)} in {amount.tensors:,}" for form, amount in forms.items())
    return f"{name:<{width}} {total.tensors:>8,} {format_size(total.nbytes):>11}  {parts}".rstrip()

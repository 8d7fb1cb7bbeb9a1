"""The files of a checkpoint's folder: which are there, which are weights, and which may not be followed. [no-torch]"""

from __future__ import annotations

import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from streaming.checkpoint.files import open_fault, read_json_object
from streaming.checkpoint.report import Report
from streaming.errors import CheckpointError

SAFETENSORS, GGUF = "*.safetensors", "*.gguf"
PICKLES = ("*.bin", "*.pt", "*.pth")
CONFIG, PARAMS = "config.json", "params.json"
INDEX = "model.safetensors.index.json"
BIN_INDEX = "pytorch_model.bin.index.json"
CONSOLIDATED = "consolidated*.safetensors"  # the same weights again, in Meta's and Mistral's own layout
SHARDED = ("firstlayer_shards.json", "model-rank-?????-part-?????.safetensors")  # what save-shards writes
# saved beside a model's weights and no part of them
_STRAYS = (
    "adapter_model*", "adapter.*", "training_args*", "optimizer*", "scheduler*", "scaler*", "rng_state*", "mmproj*",
)  # fmt: skip


@dataclass(frozen=True)
class Listing:
    """The names in one folder, sorted; hidden files (such as the "._" twins that some systems write) left out."""

    root: Path
    names: tuple[str, ...]

    def matching(self, *patterns: str) -> tuple[str, ...]:
        """Names that match any pattern, strays left out."""
        return tuple(name for name in self.names if _matches(name, patterns) and not _matches(name.lower(), _STRAYS))

    def strays(self, *patterns: str) -> tuple[str, ...]:
        """Names that match a pattern and are no part of the model, such as adapter_model.safetensors."""
        return tuple(name for name in self.names if _matches(name, patterns) and _matches(name.lower(), _STRAYS))

    def __contains__(self, name: str) -> bool:
        return name in self.names


def list_folder(root: Path) -> Listing:
    """What lies in a folder; CheckpointError when it cannot be listed."""
    try:
        names = sorted(entry.name for entry in os.scandir(root) if not entry.name.startswith("."))
    except OSError as error:
        raise CheckpointError(f"{root}: the folder cannot be listed: {open_fault(root, error)}") from error
    return Listing(root, tuple(names))


def member_fault(path: Path, hub_root: Path | None) -> str | None:
    """Why a file of the folder may not be opened, in words; None where nothing speaks against it.

    A user's own links are followed. In the hub's cache (`hub_root`) each file is a link to a blob of that cache; one
    that leads anywhere else was not made by the hub's client.
    """
    try:
        path.stat()
    except OSError as error:
        return open_fault(path, error)
    if hub_root is not None and not Path(os.path.realpath(path)).is_relative_to(hub_root):
        return f"is a link out of the hub's cache {hub_root} (to {os.path.realpath(path)}), which is not allowed"
    return None


def read_member_object(path: Path, report: Report) -> dict[str, Any]:
    """A JSON file of the folder that may be followed, as an object; {} where it cannot be read, which is reported."""
    if fault := member_fault(path, hub_root_of(path.parent)):
        report.add(f"{path}: {fault}")
        return {}
    try:
        return read_json_object(path)
    except CheckpointError as error:
        report.absorb(error)
        return {}


def hub_root_of(root: Path) -> Path | None:
    """The hub cache that a snapshot's folder (models--owner--name/snapshots/revision) belongs to, else None."""
    real = Path(os.path.realpath(root))
    snapshots = real.parent
    if snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--"):
        # the whole cache: newer clients keep blobs that models share beside the models' own folders
        return snapshots.parent.parent
    return None


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)

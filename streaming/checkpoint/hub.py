"""Models of the Hugging Face hub: what their names mean, and where its local cache has them. [no-torch]

The cache is read directly (https://huggingface.co/docs/huggingface_hub/guides/manage-cache): importing the client
takes longer than opening a model. What is not there, `streaming.checkpoint.hub_client` fetches.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from streaming.checkpoint.files import read_json_object
from streaming.checkpoint.index import read_index
from streaming.checkpoint.members import BIN_INDEX, CONFIG, INDEX, PARAMS
from streaming.checkpoint.parts import Part
from streaming.checkpoint.unopened import unused_by_file
from streaming.checkpoint.wanted_files import index_name, parts_missing, quantized_file, weight_files
from streaming.errors import CheckpointError, OptionError

_HUB_ID = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:/(?P<file>[\w./-]+\.gguf)|:(?P<quantization>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?",
    re.ASCII,
)
_TRUE = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True)
class HubId:
    """A model's name on the hub, the revision asked for (a branch, a tag or a commit), and one GGUF file of many: by
    its name, or by the quantization that its name holds."""

    repo: str
    revision: str = "main"
    file: str | None = None
    quantization: str | None = None


@dataclass(frozen=True)
class Transfer:
    """How far a fetch has come."""

    files_done: int
    files: int
    nbytes_done: int
    nbytes: int


Tell = Callable[[Transfer], None]  # called from any thread, many times a second


def parse_hub_id(text: str, *, revision: str | None = None) -> HubId | None:
    """`owner/name[/file.gguf or :QUANTIZATION][@revision]`; None where the text is no such name.

    Raises OptionError where two revisions are asked for, or one that cannot be.
    """
    found = _HUB_ID.fullmatch(text)
    if found is None or ".." in text:
        return None
    if revision is not None and found["revision"] not in (None, revision):
        raise OptionError(f"two revisions are asked for: {text} and revision {revision!r}; give one of them")
    chosen = revision or found["revision"] or "main"
    if ".." in chosen or chosen.startswith("/"):
        raise OptionError(f"revision {chosen!r} is not the name of a branch, a tag or a commit")
    return HubId(found["repo"], chosen, found["file"], found["quantization"])


def with_file(model: HubId, names: Collection[str]) -> HubId:
    """The same, with the one GGUF file of these that its quantization means. Raises CheckpointError, listing them."""
    if model.quantization is None:
        return model
    return replace(model, file=quantized_file(model.quantization, names), quantization=None)


def names_in(snapshot: Path) -> list[str]:
    """Every file of the snapshot, relative to it."""
    return [
        os.path.relpath(os.path.join(folder, name), snapshot)
        for folder, _, found in os.walk(snapshot)
        for name in found
    ]


def hub_cache() -> Path:
    """The folder of the hub's cache: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub."""
    if named := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expandvars(named)).expanduser()
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids the network, by the client's own reading of it."""
    return is_true(os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE"))


def is_true(variable: str | None) -> bool:
    """Whether a variable's value says yes: 1, on, yes or true."""
    return (variable or "").upper() in _TRUE


def repo_folder(model: HubId) -> Path:
    """Where the cache keeps this model, whether it is there or not."""
    return hub_cache() / f"models--{model.repo.replace('/', '--')}"


def cached_snapshot(model: HubId) -> Path | None:
    """The model's folder in the cache, None where that revision was never fetched."""
    folder = repo_folder(model)
    try:
        commit = (folder / "refs" / model.revision).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        commit = model.revision  # no such branch or tag: a commit has no file there
    if not commit or "/" in commit or commit == "..":
        return None
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def is_complete(
    snapshot: Path, *, load_format: str = "auto", file: str | None = None, part: Part = Part.LANGUAGE
) -> bool:
    """Whether a snapshot has all that a load format needs for this part of the model: a configuration, and every
    weights file.

    `file`: the one GGUF file that is meant. A snapshot that is wrong otherwise (a broken index, several GGUF models)
    counts as complete: fetching again would not mend it, and opening it says what is wrong.
    """
    names = names_in(snapshot)
    try:
        weights = weight_files(names, load_format=load_format, file=file)
        index = read_repo_index(snapshot, weights, names, part=part) if file is None else None
    except CheckpointError:
        several = load_format in ("auto", "gguf") and any(name.endswith(".gguf") for name in names)
        return file is None and several
    if file is None and not _has_config(names, weights):
        return False
    if index is not None:
        weights = sorted(set(index.values()))
    elif parts_missing(weights):
        return False
    return all((snapshot / name).exists() for name in weights)


def read_repo_index(
    snapshot: Path, weights: Collection[str], names: Collection[str], *, part: Part = Part.LANGUAGE
) -> dict[str, str] | None:
    """What the index of such weights says of the files that this part of the model needs, where the snapshot has one
    that can be used. OptionError where the model has no such part."""
    name = index_name(weights)
    if name is None or name not in names:
        return None
    try:
        index = read_index(snapshot / name, suffix=Path(next(iter(weights))).suffix)
    except CheckpointError:
        return None  # opening says what is wrong with it
    return _needed(index, snapshot, part) if name in (INDEX, BIN_INDEX) else index


def _needed(index: dict[str, str], snapshot: Path, part: Part) -> dict[str, str]:
    """Without the files of which the model uses nothing (see `unopened`): they are not opened, so not fetched."""
    try:
        unused = unused_by_file(index, read_json_object(snapshot / CONFIG), part=part)
    except CheckpointError:
        return index  # opening says what is wrong with the configuration
    needed = {tensor: file for tensor, file in index.items() if file not in unused}
    return needed or (index if part is Part.LANGUAGE else {})  # opening says that there is nothing of an encoder


def _has_config(names: Collection[str], weights: Collection[str]) -> bool:
    return CONFIG in names or PARAMS in names or any(name.endswith(".gguf") for name in weights)

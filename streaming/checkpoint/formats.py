"""Which opener a `--load-format` means, and how `auto` chooses. [no-torch]

An opener takes the folder or file and returns its Checkpoint; the plan knows no more of a format than that. A new
format is one more line in the table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from streaming.checkpoint.folder import open_safetensors_file, open_safetensors_folder
from streaming.checkpoint.location import locate
from streaming.checkpoint.members import CONSOLIDATED, GGUF, INDEX, PARAMS, PICKLES, SAFETENSORS, list_folder
from streaming.checkpoint.tensors import Checkpoint
from streaming.errors import CheckpointError, OptionError

Opener = Callable[[Path], Checkpoint]


def open_checkpoint(
    model: str | os.PathLike[str], *, load_format: str = "auto", revision: str | None = None
) -> Checkpoint:
    """Find a model's files and read their headers; no weight byte is read.

    `model`: "demo", a folder, a .safetensors or .gguf file, or a hub id owner/name[@revision]. Raises OptionError for
    options that cannot work and CheckpointError, with all problems of all files, for models that cannot.
    """
    opener = LOAD_FORMATS.get(load_format)
    if opener is None:
        raise OptionError(f"unknown --load-format {load_format!r}; known are {', '.join(LOAD_FORMATS)}")
    return opener(locate(model, revision=revision))


def _open_auto(path: Path) -> Checkpoint:
    if path.is_dir():
        _refuse_mistral(path)
        return _open_gguf(path) if _only_gguf(path) else _open_hf(path)
    return _open_gguf(path) if path.suffix == ".gguf" else _open_hf(path)


def _open_hf(path: Path) -> Checkpoint:
    if path.is_dir():
        return open_safetensors_folder(path)
    return _open_safetensors_file(path)


def _open_safetensors(path: Path) -> Checkpoint:
    if path.is_dir():
        return open_safetensors_folder(path, patterns=(SAFETENSORS,))
    return _open_safetensors_file(path)


def _open_gguf(path: Path) -> Checkpoint:
    from streaming.checkpoint.gguf_model import open_gguf_file, open_gguf_folder  # a fifth of the start-up's imports

    if path.is_dir():
        return open_gguf_folder(path)
    if path.suffix != ".gguf":
        raise _wrong_file(path, "gguf", ".gguf")
    return open_gguf_file(path)


def _open_safetensors_file(path: Path) -> Checkpoint:
    if path.suffix != ".safetensors":
        raise _wrong_file(path, "safetensors", ".safetensors, or .gguf with auto")
    return open_safetensors_file(path)


def _wrong_file(path: Path, load_format: str, suffix: str) -> CheckpointError:
    """One kind of file is never opened with another kind's parser."""
    if any(path.match(pattern) for pattern in PICKLES):
        return CheckpointError(f"{path}: PyTorch's own format is not supported yet; convert the model to safetensors")
    return CheckpointError(f"{path}: is not a file that format {load_format} reads; its name should end in {suffix}")


def _only_gguf(root: Path) -> bool:
    """GGUF is chosen where there is nothing else: many folders keep a converted copy beside the model."""
    listing = list_folder(root)
    return INDEX not in listing and not listing.matching(SAFETENSORS, *PICKLES) and bool(listing.matching(GGUF))


def _refuse_mistral(root: Path) -> None:
    """Consolidated files with params.json and nothing of Hugging Face's layout beside them are Mistral's own layout."""
    listing = list_folder(root)
    consolidated = listing.matching(CONSOLIDATED)
    others = set(listing.matching(SAFETENSORS)) - set(consolidated)
    if consolidated and PARAMS in listing and INDEX not in listing and not others:
        raise CheckpointError(
            f"{root}: {', '.join(consolidated)} with {PARAMS}: Mistral's own layout is not supported yet; "
            "use the model's Hugging Face layout"
        )


LOAD_FORMATS: Mapping[str, Opener] = MappingProxyType(
    {"auto": _open_auto, "hf": _open_hf, "safetensors": _open_safetensors, "gguf": _open_gguf}
)

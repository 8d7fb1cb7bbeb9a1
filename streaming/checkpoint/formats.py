"""Which opener a `--load-format` means, and how `auto` chooses. [no-torch]

An opener takes the folder or file and returns its Checkpoint; the plan knows no more of a format than that. A new
format is one more line in the table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from streaming.checkpoint.location import locate
from streaming.checkpoint.members import CONSOLIDATED, GGUF, INDEX, PARAMS, PICKLES, SAFETENSORS, SHARDED, list_folder
from streaming.checkpoint.parts import Part, gguf_has_none
from streaming.checkpoint.tensors import Checkpoint
from streaming.errors import CheckpointError, OptionError
from streaming.remote.address import is_address

if TYPE_CHECKING:
    from streaming.checkpoint.file_kinds import FileKind

Opener = Callable[[Path], Checkpoint]
_ENCODER_FORMATS = ("auto", "hf", "safetensors", "pt", "remote")


def open_checkpoint(
    model: str | os.PathLike[str],
    *,
    load_format: str = "auto",
    revision: str | None = None,
    remote_cache: str | None = None,
    part: Part = Part.LANGUAGE,
) -> Checkpoint:
    """Find a model's files and read their headers; no weight byte is read.

    `model`: "demo", a folder, a .safetensors, .gguf, .bin, .pt or .pth file, a hub id owner/name[@revision], or an
    address scheme://host/folder; `remote_cache`: where files of the last are kept for the next time; `part`: files that
    an index shows to hold nothing of it are neither fetched nor opened. (npcache alone reads .bin files whole, once, to
    write its cache.) Raises OptionError for options that cannot work and CheckpointError, with all problems of all
    files, for models that cannot.
    """
    check_load_format(load_format)
    if part is Part.ENCODER:
        check_encoder_format(load_format)
    if is_address(os.fspath(model)):
        return _open_address(
            os.fspath(model), load_format=load_format, revision=revision, remote_cache=remote_cache, part=part
        )
    if remote_cache is not None:
        raise OptionError(f"--remote-cache {remote_cache} belongs to addresses (scheme://...); {model} is none")
    if load_format == "remote":
        return _open_remote(Path(model))
    if part is Part.ENCODER:
        load_format = encoder_format(load_format)
    path = locate(model, revision=revision, load_format=load_format, part=part)
    return LOAD_FORMATS[load_format](path) if part is Part.LANGUAGE else _open_encoder(path, load_format)


def check_load_format(load_format: str) -> None:
    """Raise OptionError, listing those there are, for a format that is none."""
    if load_format not in LOAD_FORMATS:
        raise OptionError(f"unknown --load-format {load_format!r}; known are {', '.join(LOAD_FORMATS)}")


def check_encoder_format(load_format: str) -> None:
    """Raise OptionError for a format that an encoder is not read from."""
    if load_format not in _ENCODER_FORMATS:
        known = ", ".join(_ENCODER_FORMATS)
        raise OptionError(f"--load-format {load_format} reads the language part; --part encoder goes with {known}")


def encoder_format(load_format: str) -> str:
    """What `auto` means for an encoder: Hugging Face's layout."""
    return "hf" if load_format == "auto" else load_format


def _open_encoder(path: Path, load_format: str) -> Checkpoint:
    """The files of Hugging Face's layout that hold some of a multimodal model's encoder."""
    from streaming.checkpoint.file_kinds import HF_KINDS, PT_KINDS, SAFETENSORS_KIND

    if path.suffix == ".gguf" or (path.is_dir() and _only_gguf(path)):
        raise gguf_has_none(path)
    kinds = {"hf": HF_KINDS, "safetensors": (SAFETENSORS_KIND,), "pt": PT_KINDS}[load_format]
    return _open_weights(path, load_format, kinds, part=Part.ENCODER)


def _open_address(
    model: str, *, load_format: str, revision: str | None, remote_cache: str | None, part: Part
) -> Checkpoint:
    from streaming.remote.folder import open_remote

    if load_format not in ("auto", "remote") and (load_format, model[-5:]) != ("gguf", ".gguf"):
        raise OptionError(f"--load-format {load_format} reads local files; {model} is an address: use remote or auto")
    if revision is not None:
        raise OptionError(f"revision {revision!r} belongs to hub ids; {model} is an address")
    return open_remote(model, copies=None if remote_cache is None else Path(remote_cache), part=part)


def _open_remote(path: Path) -> Checkpoint:
    raise OptionError(f"--load-format remote needs an address such as https://host/folder/; {path} is none")


def _open_auto(path: Path) -> Checkpoint:
    if path.is_dir():
        if list_folder(path).matching(*SHARDED):
            return _open_sharded(path)
        if _only_mistral(path):
            return _open_mistral(path)
        return _open_gguf(path) if _only_gguf(path) else _open_hf(path)
    if path.match(CONSOLIDATED) and (path.parent / PARAMS).exists():
        return _open_mistral(path)
    return _open_gguf(path) if path.suffix == ".gguf" else _open_hf(path)


def _open_hf(path: Path) -> Checkpoint:
    from streaming.checkpoint.file_kinds import HF_KINDS

    return _open_weights(path, "hf", HF_KINDS)


def _open_safetensors(path: Path) -> Checkpoint:
    from streaming.checkpoint.file_kinds import SAFETENSORS_KIND

    return _open_weights(path, "safetensors", (SAFETENSORS_KIND,))


def _open_pt(path: Path) -> Checkpoint:
    from streaming.checkpoint.file_kinds import PT_KINDS

    return _open_weights(path, "pt", PT_KINDS)


def _open_npcache(path: Path) -> Checkpoint:
    from streaming.checkpoint.file_kinds import BIN_KIND
    from streaming.checkpoint.npcache import open_cached

    return open_cached(_open_weights(path, "npcache", (BIN_KIND,)))


def _open_gguf(path: Path) -> Checkpoint:
    from streaming.checkpoint.gguf_model import open_gguf_file, open_gguf_folder  # a fifth of the start-up's imports

    if path.is_dir():
        return open_gguf_folder(path)
    if path.suffix != ".gguf":
        raise _wrong_file(path, "gguf", ".gguf")
    return open_gguf_file(path)


def _open_mistral(path: Path) -> Checkpoint:
    from streaming.checkpoint.mistral_model import open_mistral

    return open_mistral(path)


def _open_sharded(path: Path) -> Checkpoint:
    from streaming.sharded import open_sharded

    return open_sharded(path)


def _open_runai(path: Path) -> Checkpoint:
    _need_package("runai_streamer", module="runai_model_streamer", install="runai-model-streamer")
    return _open_auto(path)


def _open_fastsafetensors(path: Path) -> Checkpoint:
    _need_package("fastsafetensors", module="fastsafetensors", install="fastsafetensors")
    return _open_auto(path)


def _need_package(load_format: str, *, module: str, install: str) -> None:
    if find_spec(module) is None:
        raise OptionError(f"--load-format {load_format} needs a package: pip install {install}")


def _open_instanttensor(path: Path) -> Checkpoint:
    return _open_safetensors(path)  # all that the package reads; the device that it needs is looked at with the plan


def _open_tensorizer(path: Path) -> Checkpoint:
    from streaming.checkpoint.file_kinds import FileKind
    from streaming.checkpoint.tensorizer_file import read_tensorizer_header

    return _open_weights(path, "tensorizer", (FileKind("tensorizer", "*.tensors", None, read_tensorizer_header),))


def _open_dummy(path: Path) -> Checkpoint:
    from streaming.dummy import open_dummy

    return open_dummy(path)


def _open_weights(
    path: Path, load_format: str, kinds: tuple[FileKind, ...], *, part: Part = Part.LANGUAGE
) -> Checkpoint:
    """A folder that has files of one of these kinds, or one such file."""
    from streaming.checkpoint.folder import open_weights_file, open_weights_folder

    if path.is_dir():
        return open_weights_folder(path, kinds=kinds, of_model=part)
    kind = next((kind for kind in kinds if path.suffix == kind.suffix), None)
    if kind is None:
        raise _wrong_file(path, load_format, " or ".join(kind.suffix for kind in kinds))
    return open_weights_file(path, kind=kind)


def _wrong_file(path: Path, load_format: str, suffix: str) -> CheckpointError:
    """One kind of file is never opened with another kind's parser."""
    if path.suffix == ".json":
        return CheckpointError(f"{path}: is no weights file; give the folder that holds the model, {path.parent}")
    return CheckpointError(f"{path}: is not a file that format {load_format} reads; its name should end in {suffix}")


def _only_gguf(root: Path) -> bool:
    """GGUF is chosen where there is nothing else: many folders keep a converted copy beside the model."""
    listing = list_folder(root)
    return INDEX not in listing and not listing.matching(SAFETENSORS, *PICKLES) and bool(listing.matching(GGUF))


def _only_mistral(root: Path) -> bool:
    """Consolidated files with params.json and nothing of Hugging Face's layout beside them are Mistral's own layout."""
    listing = list_folder(root)
    consolidated = listing.matching(CONSOLIDATED)
    others = set(listing.matching(SAFETENSORS)) - set(consolidated)
    return bool(consolidated) and PARAMS in listing and INDEX not in listing and not others


LOAD_FORMATS: Mapping[str, Opener] = MappingProxyType(
    {"auto": _open_auto, "hf": _open_hf, "safetensors": _open_safetensors, "pt": _open_pt,
     "npcache": _open_npcache, "gguf": _open_gguf, "mistral": _open_mistral,
     "sharded_state": _open_sharded, "dummy": _open_dummy, "remote": _open_remote,
     "runai_streamer": _open_runai, "fastsafetensors": _open_fastsafetensors, "instanttensor": _open_instanttensor,
     "tensorizer": _open_tensorizer}
)  # fmt: skip

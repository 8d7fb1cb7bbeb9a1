"""Several sources that make one checkpoint: a part of a model kept in another folder, under a prefix of its own.
[no-torch]

The configuration is the first source's, the one that the user calls the model. Every name of a further source gets that
source's prefix; a name that two sources hold is an error that names both files, for nothing says which is meant.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from streaming.errors import CheckpointError, OptionError

if TYPE_CHECKING:
    from streaming.checkpoint.tensors import Checkpoint, TensorInfo

_SOLE_FORMATS = ("dummy", "sharded_state", "gguf", "mistral", "npcache")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A further place that tensors come from.

    `path`: a folder or file of weights (.safetensors, .bin, .pt, .pth), or a hub id; `revision`: of a hub id;
    `prefix`: what is put before its names; `patterns`: the files that are taken, such as "encoder-*.safetensors"
    (none: as for any model's folder).
    """

    path: str
    revision: str | None = None
    prefix: str = ""
    patterns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.path:
            raise OptionError("--source: a path or a hub id is needed")
        if type(self.patterns) is not tuple:
            raise OptionError(f'patterns {self.patterns!r}: a tuple of names is needed, such as ("*.safetensors",)')
        if any(not pattern or "/" in pattern for pattern in self.patterns):
            raise OptionError(f"--source {self.path}: patterns are names of files in its folder, such as *.safetensors")


def parse_source(text: str) -> Source:
    """A Source from PATH[@REVISION][=PREFIX[,PATTERN...]]. A path that exists is one, whatever its name holds."""
    if "=" not in text or os.path.lexists(text):
        return Source(path=text)
    path, _, rest = text.rpartition("=")
    prefix, *patterns = rest.split(",")
    return Source(path=path, prefix=prefix, patterns=tuple(patterns))


def join_sources(checkpoint: Checkpoint, sources: Sequence[Source]) -> Checkpoint:
    """The checkpoint with the tensors of all sources.

    Raises CheckpointError, with all names that two of them hold, OptionError for formats that stand for themselves.
    """
    if not sources:
        return checkpoint
    if checkpoint.address is not None or checkpoint.format in _SOLE_FORMATS:
        what = "a remote model" if checkpoint.address is not None else f"a model of format {checkpoint.format}"
        raise OptionError(f"--source {sources[0].path}: goes with local safetensors and PyTorch files, not with {what}")
    tensors, files, notes = dict(checkpoint.tensors), list(checkpoint.files), list(checkpoint.notes)
    states = dict(checkpoint.states)
    problems: list[str] = []
    for source in sources:
        part = _open_part(source)
        named = [replace(info, name=f"{source.prefix}{name}") for name, info in part.tensors.items()]
        problems.extend(_twice(tensors, named))
        tensors.update((info.name, info) for info in named)
        files.extend(file for file in part.files if file not in files)
        notes.extend(part.notes)
        states = {**part.states, **states}  # of a file that two sources name, the earlier look
    if problems:
        raise CheckpointError("; ".join(problems[:20]), tuple(problems))
    return replace(checkpoint, tensors=tensors, files=tuple(files), notes=tuple(notes), states=states)


def _open_part(source: Source) -> Checkpoint:
    from streaming.checkpoint.file_kinds import HF_KINDS
    from streaming.checkpoint.folder import open_weights_file, open_weights_folder
    from streaming.checkpoint.location import locate
    from streaming.remote.address import is_address

    if is_address(source.path):
        raise OptionError(f"--source {source.path}: a further source is a local path or a hub id, not an address")
    path = locate(source.path, revision=source.revision)
    if path.is_dir():
        return open_weights_folder(path, kinds=HF_KINDS, part=True, patterns=source.patterns)
    if source.patterns:
        raise OptionError(f"--source {source.path}: is a file; patterns choose files of a folder")
    kind = next((kind for kind in HF_KINDS if path.suffix == kind.suffix), None)
    if kind is None:
        known = ", ".join(kind.suffix for kind in HF_KINDS)
        raise CheckpointError(f"{path}: a further source is a folder or a file whose name ends in {known}")
    return open_weights_file(path, kind=kind, part=True)


def _twice(tensors: dict[str, TensorInfo], named: Iterable[TensorInfo]) -> Iterable[str]:
    for info in named:
        if (other := tensors.get(info.name)) is not None:
            yield (
                f"tensor {info.name!r} is in two sources, {other.file} and {info.file}: remove one, or give the second "
                "a prefix of its own"
            )

"""What makes a stored form what it is: the source files as they are now, the schemes, the cut. [no-torch]

Two runs with the same key keep the same bytes. Files count by name, size, time and inode (of servers: by address, size,
ETag and date), not by their bytes: a copy of a model is another model.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import uuid
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from streaming.checkpoint.remote_file import RemoteFile, WeightFile
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.errors import CheckpointError
from streaming.file_faults import system_fault
from streaming.open_files import FileState, state_of

if TYPE_CHECKING:
    from layers.weights import ParamSpec
    from streaming.prepare import Prepared

FORMAT = 1  # of the folder, and of what schemes make of the same numbers: goes up where either changes
THIS_RUN = "this_run_only"  # is in a key that no other run will have
_WORD = 32  # letters of the word that stands for a key


def cache_key(prepared: Prepared) -> dict[str, object]:
    """The key of what this run keeps, for JSON.

    A file on a server that tells neither ETag nor date may change unnoticed: such a key is this run's alone, and its
    folder goes when the cache is closed. Raises CheckpointError for a file that cannot be looked at any more.
    """
    checkpoint, mesh = prepared.checkpoint, prepared.topology
    key: dict[str, object] = {
        "format": FORMAT,
        "files": [_file(file, checkpoint.states.get(file)) for file in checkpoint.files],
        "tensors": _digest(_tensor_words(checkpoint)),
        "config": _digest([json.dumps(dict(checkpoint.config), sort_keys=True, default=str)]),
        "quantization": prepared.quantization_words,
        "weights": _digest(_param_words(param) for spec in prepared.specs for param in spec.params),
        "scale_percentile": prepared.options.scale_percentile,
        "dtype": prepared.dtype.value,
        "device": prepared.options.device.partition(":")[0],
        "seed": prepared.options.seed if checkpoint.format == "dummy" else None,
        "cut": [mesh.tensor, mesh.expert, mesh.pipeline, mesh.rank, mesh.placement, mesh.expert_map],
        "byte_order": sys.byteorder,
    }
    if any(isinstance(file, RemoteFile) and not (file.etag or file.modified) for file in checkpoint.files):
        key[THIS_RUN] = uuid.uuid4().hex
    return key


def key_bytes(key: Mapping[str, object]) -> bytes:
    """The key as key.json holds it; the same for equal keys."""
    return json.dumps(dict(key), sort_keys=True, indent=1).encode() + b"\n"


def key_word(key: Mapping[str, object]) -> str:
    """The word that stands for it: its folder's name."""
    return hashlib.sha256(key_bytes(key)).hexdigest()[:_WORD]


def _file(file: WeightFile, state: FileState | None) -> dict[str, object]:
    """A file's version; `state`: what it was before its header was read."""
    if isinstance(file, RemoteFile):
        return {"url": file.url, "size": file.nbytes, "etag": file.etag, "modified": file.modified}
    try:
        _, inode, size, mtime_ns = state or state_of(os.stat(file))
    except OSError as error:
        raise CheckpointError(system_fault(file, error.errno)) from error
    return {"name": file.name, "size": size, "mtime_ns": mtime_ns, "inode": inode}


def _digest(lines: Iterator[str] | list[str]) -> str:
    found = hashlib.sha256()
    for line in lines:
        found.update(f"{line}\n".encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def _tensor_words(checkpoint: Checkpoint) -> Iterator[str]:
    numbers = {file: number for number, file in enumerate(checkpoint.files)}
    for name, info in sorted(checkpoint.tensors.items()):
        yield f"{name!r} {numbers.get(info.file)} {_form(info)}"


def _form(info: TensorInfo) -> str:
    encoding = None if info.encoding is None else info.encoding.name
    plain = (info.dtype.value, info.shape, info.offset, info.nbytes, encoding, info.strides)
    return repr((*plain, info.rope_heads, info.big_endian, info.shift, info.generated))


def _param_words(param: ParamSpec) -> str:
    """How a parameter is kept. Schemes are frozen dataclasses: their text names every rule."""
    cut = None if param.cut is None else (param.cut.parts, param.cut.columns)
    return repr((param.name, param.shape, param.kind.value, param.dtype.value, param.scheme, param.kept_rows, cut))

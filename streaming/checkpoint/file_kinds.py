"""The kinds of weight files: which names they have, which index belongs to them, and what reads their headers.
[no-torch]

A file is of one kind by its name, and is only ever read as that kind: one that is another by its content is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from streaming.checkpoint.file_content import GGUF_FILE, LEGACY, TAR, ZIP, kind_of
from streaming.checkpoint.files import open_weights
from streaming.checkpoint.members import BIN_INDEX, INDEX, SAFETENSORS
from streaming.checkpoint.safetensors import read_safetensors_header
from streaming.checkpoint.tensors import TensorInfo
from streaming.errors import CheckpointFormatError

Header = Mapping[str, TensorInfo]
ReadHeader = Callable[[Path], tuple[Header, tuple[str, ...]]]


@dataclass(frozen=True)
class FileKind:
    """One kind; `read_header` gives the tensors and notes for the user, or raises CheckpointFormatError."""

    format: str  # of the Checkpoint that such files make
    pattern: str
    index: str | None  # the file that says which tensor is in which file, where there is one
    read_header: ReadHeader

    @property
    def suffix(self) -> str:
        """How its files' names end, with the dot."""
        return self.pattern.removeprefix("*")


def _read_safetensors(path: Path) -> tuple[Header, tuple[str, ...]]:
    try:
        return read_safetensors_header(path), ()
    except CheckpointFormatError as error:
        with open_weights(path) as (file, size):
            words = _NOT_SAFETENSORS.get(kind_of(os.pread(file.fileno(), 512, 0), size) or "")
        if words is None:
            raise
        raise CheckpointFormatError(f"{path}: is {words} by its content, not a safetensors file") from error


def _read_pickle(path: Path) -> tuple[Header, tuple[str, ...]]:
    from streaming.checkpoint.pickles import read_pickle_header  # a tenth of the start-up's imports

    return read_pickle_header(path)


_NOT_SAFETENSORS = {
    ZIP: "a zip archive, such as torch.save writes,",
    LEGACY: "a file of torch.save",
    TAR: "a tar archive",
    GGUF_FILE: "a GGUF file",
}
SAFETENSORS_KIND = FileKind("safetensors", SAFETENSORS, INDEX, _read_safetensors)
BIN_KIND = FileKind("pt", "*.bin", BIN_INDEX, _read_pickle)
PT_KINDS = (FileKind("pt", "*.pt", None, _read_pickle), FileKind("pt", "*.pth", None, _read_pickle))
HF_KINDS = (SAFETENSORS_KIND, BIN_KIND, *PT_KINDS)  # the first that a folder has is the model

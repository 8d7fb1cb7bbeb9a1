"""The files and tensors of a multimodal model's encoder (vision tower, projector), and of nothing else. [no-torch]"""

from __future__ import annotations

import os
from dataclasses import replace

from streaming.checkpoint.formats import open_checkpoint
from streaming.checkpoint.parts import Part, encoder_beginnings
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.errors import CheckpointError


def open_encoder_files(
    model: str | os.PathLike[str],
    *,
    load_format: str = "auto",
    revision: str | None = None,
    remote_cache: str | None = None,
) -> Checkpoint:
    """The encoder's tensors under their own names, in the order in which they lie in its files; from headers alone.

    Arguments: as of `open_checkpoint`. With an index, files that hold nothing of the encoder are neither fetched nor
    opened; without one the index is the headers, and every file's is read. Raises OptionError for a text model and
    for formats that hold no encoder, CheckpointError with all problems of the files, or where they hold none of it.
    """
    checkpoint = open_checkpoint(
        model, load_format=load_format, revision=revision, remote_cache=remote_cache, part=Part.ENCODER
    )
    beginnings = encoder_beginnings(checkpoint.config)
    found = [info for name, info in checkpoint.tensors.items() if name.startswith(beginnings)]
    if not found:
        count, known = len(checkpoint.tensors), ", ".join(beginnings)
        raise CheckpointError(
            f"{checkpoint.name}: none of {count:,} tensors is of the encoder: its names begin {known}"
        )
    order = {file: number for number, file in enumerate(checkpoint.files)}
    found.sort(key=lambda info: (order[info.file], info.offset, info.nbytes))
    files = tuple(dict.fromkeys(info.file for info in found))
    return replace(checkpoint, tensors=_by_name(found), files=files)


def _by_name(tensors: list[TensorInfo]) -> dict[str, TensorInfo]:
    return {info.name: info for info in tensors}

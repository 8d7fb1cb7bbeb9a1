"""A multimodal model's encoder (vision tower, projector) as data, for those who run it elsewhere.

    weights = open_encoder("folder-or-hub-id-or-address")
    for name, tensor in weights.items():
        ...

firstlayer runs the language part; of the rest it gives the tensors, under the names and in the dtypes and shapes that
the checkpoint has. No file that holds only language is opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, KeysView, Mapping, Sequence
from contextlib import closing

import torch
from torch import Tensor

from quant.dtypes import to_torch
from streaming.checkpoint.decode import decode_rows
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.encoder_files import open_encoder_files
from streaming.file_ranges import FileRanges, open_ranges
from streaming.read_plan import PIECE_NBYTES

PIECES_AT_ONCE = 4  # asked for together: a server's answers come side by side


def open_encoder(
    model: str | os.PathLike[str],
    *,
    load_format: str = "auto",
    revision: str | None = None,
    remote_cache: str | None = None,
) -> EncoderWeights:
    """Find a multimodal model's encoder; headers are read and no weights.

    `model`: a folder, a weights file, a hub id (only files that hold some of the encoder are fetched) or an address.
    `load_format`: auto, hf, safetensors, pt or remote. Raises OptionError for a text model, CheckpointError with all
    problems of the files.
    """
    return EncoderWeights(
        open_encoder_files(model, load_format=load_format, revision=revision, remote_cache=remote_cache)
    )


class EncoderWeights:
    """The encoder's tensors by name, read when they are asked for.

    `items()` reads all of them once, in file order, and holds one tensor and PIECES_AT_ONCE pieces at a time;
    `weights[name]` reads one. Tensors are new, contiguous and on the CPU. Reading raises CheckpointError that names
    the file: one that is gone, cut short, or not what it was when its header was read.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._bytes_read = 0

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What the headers say of each tensor, in file order."""
        return self._checkpoint.tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as they are in the files."""
        return self._checkpoint.nbytes

    @property
    def bytes_read(self) -> int:
        """Bytes of weights read so far; `nbytes` after one pass through `items()`."""
        return self._bytes_read

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def keys(self) -> KeysView[str]:
        """The names, in file order."""
        return self.tensors.keys()

    def __getitem__(self, name: str) -> Tensor:
        (found,) = self._read([self.tensors[name]])
        return found[1]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Every name and its tensor, in file order."""
        for file in self._checkpoint.files:
            yield from self._read([info for info in self.tensors.values() if info.file == file])

    def _read(self, infos: Sequence[TensorInfo]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of one file."""
        file = infos[0].file
        with closing(open_ranges(file, state=self._checkpoint.states.get(file))) as ranges:
            for run in _runs(infos):
                pieces = self._pieces(ranges, run[0].offset, sum(info.nbytes for info in run))
                for info, data in _cut(run, pieces):
                    yield info.name, _as_tensor(info, data)

    def _pieces(self, ranges: FileRanges, offset: int, nbytes: int) -> Iterator[memoryview]:
        """The bytes of a run, piece by piece."""
        bounds = [(offset + start, min(PIECE_NBYTES, nbytes - start)) for start in range(0, nbytes, PIECE_NBYTES)]
        for first in range(0, len(bounds), PIECES_AT_ONCE):
            for piece in ranges.read(bounds[first : first + PIECES_AT_ONCE]):
                self._bytes_read += len(piece)
                yield memoryview(piece)


def _runs(infos: Sequence[TensorInfo]) -> Iterator[list[TensorInfo]]:
    """Tensors whose bytes follow each other without a gap. (Two names of the same bytes are two runs.)"""
    run: list[TensorInfo] = []
    for info in infos:
        if run and info.offset != run[-1].offset + run[-1].nbytes:
            yield run
            run = []
        run.append(info)
    if run:
        yield run


def _cut(run: Sequence[TensorInfo], pieces: Iterator[memoryview]) -> Iterator[tuple[TensorInfo, bytearray]]:
    """Each tensor's own bytes from the pieces of the whole run, which end anywhere."""
    left = memoryview(b"")
    for info in run:
        data, filled = bytearray(info.nbytes), 0
        while filled < info.nbytes:
            left = left or next(pieces)
            part = left[: info.nbytes - filled]
            data[filled : filled + len(part)] = part
            filled += len(part)
            left = left[len(part) :]
        yield info, data


def _as_tensor(info: TensorInfo, data: bytearray) -> Tensor:
    """The numbers in these bytes, in the tensor's own dtype and shape; the memory is shared where they are plain."""
    if not data:
        return torch.empty(info.shape, dtype=to_torch(info.dtype))
    if info.is_plain:
        return torch.frombuffer(data, dtype=to_torch(info.dtype)).view(info.shape)
    return decode_rows(info, data, rows=(0, info.shape[0] if info.shape else 1)).view(info.shape)

"""What lies where in a checkpoint: the one protocol that every format answers to, from headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant.dtypes import DType

if TYPE_CHECKING:
    from streaming.checkpoint.remote_file import WeightFile
    from streaming.checkpoint.unopened import Unopened
    from streaming.open_files import FileState


MOST_TENSORS = 1 << 18  # of one file or one index; the largest models have some 150,000


@dataclass(frozen=True)
class Encoding:
    """A block format that must be decoded before its numbers can be used (GGUF's Q4_1 and its like).

    Every row of the tensor is a whole number of blocks, so rows can be read and decoded on their own.
    """

    name: str
    block_values: int
    block_nbytes: int


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint: its name there (in Hugging Face's spelling), and which bytes of which file it is."""

    name: str
    shape: tuple[int, ...]
    dtype: DType  # of the numbers; for encoded tensors the dtype they decode to (F32)
    file: WeightFile
    offset: int  # of the first byte, from the start of the file
    nbytes: int
    encoding: Encoding | None = None
    # Rows of each of this many heads are stored interleaved and are put right: even ones first, then odd ones. GGUF's
    # llama q/k are so; an expert whose gate and up take turns is one head.
    rope_heads: int = 0
    big_endian: bool = False
    strides: tuple[int, ...] | None = None  # in elements, where numbers do not lie row after row: it is read whole
    shift: float = 0.0  # added to each number (GGUF's gemma norms, which are kept with 1 on top)
    generated: bool = False  # no file holds it: its bytes are made up where they are wanted (streaming.dummy)

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row (an index of dim 0)."""
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes

    @property
    def row_unit(self) -> int:
        """Rows are read and decoded in multiples of this many: a whole head where its rows are interleaved, the whole
        tensor where its rows are no runs of bytes, else 1."""
        if self.strides is not None:
            return self.shape[0]
        return self.shape[0] // self.rope_heads if self.rope_heads else 1

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_plain(self) -> bool:
        """Whether its bytes are its numbers, in this machine's order: no decoding, no arithmetic,
        no permutation."""
        stored_otherwise = self.encoding or self.rope_heads or self.big_endian or self.shift
        return not stored_otherwise and self.strides is None

    def transposed(self) -> TensorInfo:
        """The same bytes as this tensor's transpose; it has two dims of plain numbers, in whatever order they lie."""
        assert len(self.shape) == 2
        assert self.encoding is None
        assert not self.rope_heads
        rows, columns = self.shape
        along_rows, along_columns = self.strides or (columns, 1)
        strides = (along_columns, along_rows)
        return replace(self, shape=(columns, rows), strides=None if strides == (rows, 1) else strides)


@dataclass(frozen=True)
class Checkpoint:
    """A model's files as data: what `open_checkpoint` found. No weight byte has been read."""

    root: Path  # the folder, or the single file
    format: str  # "safetensors", "pt" (PyTorch's own), "gguf", ...
    tensors: Mapping[str, TensorInfo]
    files: tuple[WeightFile, ...]
    config: Mapping[str, Any]  # config.json, or its twin built from a GGUF's metadata
    metadata: Mapping[str, Any]  # a GGUF's own metadata (tokenizer, chat template); empty for others
    notes: tuple[str, ...] = ()  # warnings for the user
    address: str | None = None  # where a remote model lies; its `root` holds the small files alone
    unopened: tuple[Unopened, ...] = ()  # files of which nothing is used
    saved: Mapping[str, Any] | None = None  # the manifest, where tensors are on disk in stored form (streaming.sharded)
    states: Mapping[WeightFile, FileState] = field(default_factory=dict)  # of local files before their header was read

    @property
    def name(self) -> str:
        """What to call it in messages: its address, or its folder or file."""
        return self.address or str(self.root)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

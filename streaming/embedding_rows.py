"""Embedding rows on their own: the prompt needs a few kilobytes of a table that may be the largest tensor of the file.

They are fetched straight from the checkpoint by the forward thread before anything else, so the table itself can be
read last (as a tied head, or after it). The same conversions as for the whole table make the same bits. Where a rank
can read some of the rows only (its own shards), nothing is fetched: the table itself serves from the first token on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quant.dtypes import DType, to_torch
from streaming.checkpoint.decode import decode_into
from streaming.checkpoint.tensors import TensorInfo
from streaming.dummy_pattern import pattern_block, read_pattern
from streaming.errors import CheckpointError, LayerLoadError
from streaming.file_ranges import open_ranges
from streaming.open_files import FileState

KEPT_NBYTES = 8 << 20  # of rows, for tokens that come again; more where a step has more


class EmbeddingRows:
    """Rows of one embedding table, by token id, in the model's dtype on the CPU."""

    def __init__(self, table: TensorInfo | None, *, dtype: DType, state: FileState | None = None) -> None:
        """`table`: None where no file has all rows. `state`: of its file, when the load was planned."""
        self.read_nbytes = 0
        self._rows: dict[int, torch.Tensor] = {}
        self._dtype, self.available, self._ranges = dtype, table is not None, None
        if table is None:
            return
        self._table = table
        self._most_rows = KEPT_NBYTES // max(1, table.shape[-1] * dtype.itemsize)
        self._pattern = pattern_block(table.file.name) if table.generated else None
        try:
            self._ranges = None if table.generated else open_ranges(table.file, state=state)
        except CheckpointError as error:
            raise LayerLoadError("embed", "read", table.name, error) from error

    def fetch(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[len(token_ids), hidden]; a row that was just read is not read again. Raises LayerLoadError with the file."""
        missing = sorted(set(token_ids) - self._rows.keys())
        if missing and len(self._rows) + len(missing) > self._most_rows:  # else they would become the table
            self._rows.clear()
            missing = sorted(set(token_ids))
        if missing and self._table.strides is not None:
            self._pick_rows(missing)
            missing = []
        for token, raw in zip(missing, self._read(missing), strict=True):
            self._rows[token] = self._decode(torch.frombuffer(raw, dtype=torch.uint8), token)
        return torch.stack([self._rows[token] for token in token_ids])

    def _pick_rows(self, tokens: Sequence[int]) -> None:
        """Rows that are no runs of bytes (the table is a view of others' numbers): the table is read whole for them."""
        out = torch.empty(self._table.shape, dtype=to_torch(self._table.dtype))
        decode_into(self._table, self._read_ranges([(self._table.offset, self._table.nbytes)])[0], out, first_row=0)
        for token in tokens:
            self._rows[token] = out[token].to(to_torch(self._dtype), copy=True)  # a view would keep the table

    def _offset(self, token: int) -> int:
        return self._table.offset + token * self._table.row_nbytes

    def _read(self, tokens: Sequence[int]) -> list[bytearray]:
        if self._ranges is None:
            return [self._made_up(token) for token in tokens]
        return self._read_ranges([(self._offset(token), self._table.row_nbytes) for token in tokens])

    def _read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytearray]:
        assert self._ranges is not None
        try:
            rows = self._ranges.read(ranges)
        except CheckpointError as error:
            raise LayerLoadError("embed", "read", self._table.name, error) from error
        self.read_nbytes += sum(map(len, rows))
        return rows

    def _made_up(self, token: int) -> bytearray:
        assert self._pattern is not None
        raw = bytearray(self._table.row_nbytes)
        read_pattern(self._pattern, memoryview(raw), self._offset(token))
        return raw

    def _decode(self, raw: torch.Tensor, token: int) -> torch.Tensor:
        if self._table.is_plain:
            return raw.view(to_torch(self._table.dtype)).to(to_torch(self._dtype))
        out = torch.empty(1, *self._table.shape[1:], dtype=to_torch(self._dtype))
        decode_into(self._table, raw, out, first_row=token)
        return out[0]

    def cancel(self) -> None:
        """Make a fetch that waits for a server end soon, with StreamClosedError."""
        if self._ranges is not None:
            self._ranges.cancel()

    def close(self) -> None:
        """Give the descriptor back."""
        if self._ranges is not None:
            self._ranges.close()

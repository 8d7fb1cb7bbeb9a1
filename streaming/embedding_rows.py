"""Embedding rows on their own: the prompt needs a few kilobytes of a table that may be the largest tensor of the file.

They are fetched straight from the checkpoint by the forward thread before anything else, so the table itself can be
read last (as a tied head, or after it). The same conversions as for the whole table make the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from quant.dtypes import DType, to_torch
from streaming.checkpoint.decode import decode_into
from streaming.checkpoint.tensors import TensorInfo
from streaming.errors import LayerLoadError


class EmbeddingRows:
    """Rows of one embedding table, by token id, in the model's dtype on the CPU."""

    def __init__(self, table: TensorInfo, *, dtype: DType) -> None:
        self._table, self._dtype = table, dtype
        try:
            self._descriptor = os.open(table.file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise LayerLoadError("embed", "read", table.name, f"{table.file}: {error.strerror}") from error
        self._rows: dict[int, torch.Tensor] = {}
        self.read_nbytes = 0

    def fetch(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[len(token_ids), hidden]; each distinct row is read once. Raises LayerLoadError naming the file."""
        missing = sorted(set(token_ids) - self._rows.keys())
        for token in missing:  # all are asked for before the first is awaited: behind a busy reader each wait is long
            os.posix_fadvise(self._descriptor, self._offset(token), self._table.row_nbytes, os.POSIX_FADV_WILLNEED)
        for token in missing:
            self._rows[token] = self._read(token)
        return torch.stack([self._rows[token] for token in token_ids])

    def _offset(self, token: int) -> int:
        return self._table.offset + token * self._table.row_nbytes

    def _read(self, token: int) -> torch.Tensor:
        raw = bytearray(self._table.row_nbytes)
        try:
            got = os.preadv(self._descriptor, [raw], self._offset(token))
        except OSError as error:
            raise LayerLoadError("embed", "read", self._table.name, f"{self._table.file}: {error.strerror}") from error
        if got != len(raw):
            raise LayerLoadError("embed", "read", self._table.name, f"{self._table.file} ended before row {token}")
        self.read_nbytes += got
        return self._decode(torch.frombuffer(raw, dtype=torch.uint8), token)

    def _decode(self, raw: torch.Tensor, token: int) -> torch.Tensor:
        if self._table.is_plain:
            return raw.view(to_torch(self._table.dtype)).to(to_torch(self._dtype))
        out = torch.empty(1, *self._table.shape[1:], dtype=to_torch(self._dtype))
        decode_into(self._table, raw, out, first_row=token)
        return out[0]

    def close(self) -> None:
        """Give the descriptor back."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

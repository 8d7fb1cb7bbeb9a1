"""One sequence's keys and values, allocated whole at the start, so that memory is known before the first token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layers.model_config import ModelConfig
from quant.dtypes import DType, to_torch

if TYPE_CHECKING:
    import torch


def kv_cache_nbytes(config: ModelConfig, *, max_tokens: int, dtype: DType) -> int:
    """Bytes of a KVCache: keys and values of every layer for `max_tokens` tokens. Imports no torch."""
    return 2 * config.num_layers * config.num_kv_heads * max_tokens * config.head_dim * dtype.itemsize


class KVCache:
    """Keys and values [kv_heads, capacity, head_dim] of every layer; the first `length` tokens are filled.

    A step appends to one layer after the other and then advances `length` once. A step that is given up halfway
    leaves `length` as it was: its keys are overwritten by the next one.
    """

    def __init__(self, config: ModelConfig, *, max_tokens: int, dtype: DType, device: str = "cpu") -> None:
        import torch

        shape = (2, config.num_layers, config.num_kv_heads, max_tokens, config.head_dim)
        self._slots: torch.Tensor = torch.empty(shape, dtype=to_torch(dtype), device=device)
        self.capacity = max_tokens
        self.length = 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._slots.nbytes

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a step's keys and values [kv_heads, n, head_dim] behind the filled part of one layer.

        Returns that layer's keys and values [kv_heads, length + n, head_dim], as views. Raises ValueError when they
        do not fit.
        """
        stop = self.length + keys.shape[1]
        if stop > self.capacity:
            raise ValueError(
                f"the KV cache holds {self.capacity} tokens; {self.length} are filled and {stop - self.length} more "
                "were given"
            )
        self._slots[0, layer, :, self.length : stop] = keys
        self._slots[1, layer, :, self.length : stop] = values
        return self._slots[0, layer, :, :stop], self._slots[1, layer, :, :stop]

    def advance(self, count: int) -> None:
        """Count the tokens that every layer has now appended."""
        if not 0 <= count <= self.capacity - self.length:
            raise ValueError(
                f"the KV cache holds {self.capacity} tokens; {self.length} are filled and {count} more were given"
            )
        self.length += count

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on. Raises ValueError for a length that is not filled."""
        if not 0 <= length <= self.length:
            raise ValueError(f"the KV cache cannot be cut to {length} tokens: {self.length} are filled")
        self.length = length

"""Causal self-attention with grouped query heads, one sequence of the batch at a time.

T tokens of the batch, n of a sequence, S of that sequence with its past; D hidden size, H query heads, G key/value
heads, d head_dim.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from layers.batch import Batch
from layers.context import StepContext
from layers.linear import QKVParallelLinear, RowParallelLinear
from layers.norm import RMSNorm
from layers.rotary import Rope


class Attention(nn.Module):
    """Projections, rotation and scaled dot products of one layer.

    `window` is how many positions a token attends to, its own included; None is all of them. `q_norm` and `k_norm`
    act on each head by itself.
    """

    def __init__(
        self,
        *,
        layer: int,
        head_dim: int,
        window: int | None,
        qkv_proj: QKVParallelLinear,
        o_proj: RowParallelLinear,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = head_dim
        self.window = window
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.q_norm = q_norm
        self.k_norm = k_norm

    def forward(self, x: torch.Tensor, batch: Batch, rope: Rope, ctx: StepContext) -> torch.Tensor:
        """x [T, D] -> [T, D]; each sequence's keys and values are appended to its cache."""
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv_proj(x, ctx))  # [T, H or G, d]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rope.rotate(q), rope.rotate(k)
        mixed = torch.empty_like(q)
        for sequence in batch.sequences:
            rows = slice(sequence.start, sequence.stop)
            keys, values = sequence.cache.append(self.layer, k[rows].transpose(0, 1), v[rows].transpose(0, 1))
            mixed[rows] = attend(q[rows].transpose(0, 1), keys, values, window=self.window).transpose(0, 1)
        out: torch.Tensor = self.o_proj(mixed.flatten(1), ctx)
        return out


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, window: int | None) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v, causal: q [H, n, d] are the last n of the S positions of keys and values [G, S, d].

    Returns [H, n, d]. The softmax is float32 inside the kernel.
    """
    heads, count, width = q.shape
    groups, length = keys.shape[:2]
    if window is not None and length > window + count - 1:
        first = length - (window + count - 1)  # positions that no query's window reaches
        keys, values, length = keys[:, first:], values[:, first:], length - first
    if count == 1:  # every key left is seen: the query heads of a group become the rows of one product
        packed = q.reshape(groups, heads // groups, width)
        return _products(packed, keys, values, mask=None, causal=False).reshape(heads, 1, width)
    masked = count < length or (window is not None and length > window)
    mask = causal_mask(count, length, window=window, device=q.device) if masked else None
    return _products(q, keys, values, mask=mask, causal=mask is None)


def _products(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, mask: torch.Tensor | None, causal: bool
) -> torch.Tensor:
    gqa = q.shape[0] != keys.shape[0]
    return functional.scaled_dot_product_attention(
        q[None], keys[None], values[None], attn_mask=mask, is_causal=causal, enable_gqa=gqa
    )[0]


def causal_mask(count: int, length: int, *, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [count, length], true where the query of row i (at position length - count + i) sees the key of column j."""
    queries = torch.arange(length - count, length, device=device)[:, None]
    keys = torch.arange(length, device=device)[None]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)

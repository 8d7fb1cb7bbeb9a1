"""Causal self-attention with grouped query heads, one sequence of the batch at a time.

T tokens of the batch, n of a sequence, S of that sequence with its past; D hidden size, H query heads, G key/value
heads, d head_dim. With tensor parallelism H and G are those of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from layers.batch import Batch, BatchSequence
from layers.causal_mask import causal_mask, first_reached, reached
from layers.context import StepContext
from layers.linear import QKVParallelLinear, RowParallelLinear
from layers.norm import norm_heads, shared_variances
from layers.parallel import Group
from layers.parameters import declare, parameter
from layers.rotary import Ropes
from layers.sinks import attend_with_sinks
from layers.softcap import attend_capped
from layers.weights import ParamSpec


@dataclass(frozen=True)
class Scores:
    """How the scores of a layer are made: `window` is how many positions a token attends to, its own included (None:
    all of them), `scale` stands for 1 / sqrt(head_dim), and `softcap` bounds what it multiplies."""

    window: int | None = None
    scale: float | None = None
    softcap: float | None = None


class Attention(nn.Module):
    """Projections, rotation and scaled dot products of one layer.

    `q_norm` and `k_norm` act on each head by itself, or on `whole` queries and keys. `local` layers rotate by the
    local angles. `sinks` [H]: a score of each head, see layers.sinks; there is no softcap then.
    """

    def __init__(
        self,
        *,
        layer: int,
        head_dim: int,
        scores: Scores,
        local: bool,
        qkv_proj: QKVParallelLinear,
        o_proj: RowParallelLinear,
        q_norm: nn.Module | None,
        k_norm: nn.Module | None,
        whole: bool = False,
        sinks: ParamSpec | None = None,
    ) -> None:
        super().__init__()
        if sinks is not None:
            declare(self, sinks)
        self._has_sinks = sinks is not None
        self.layer = layer
        self.head_dim = head_dim
        self.scores = scores
        self.local = local
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.whole = whole
        self._queries = qkv_proj.sections[0] // head_dim  # H

    def forward(self, x: torch.Tensor, batch: Batch, ropes: Ropes, ctx: StepContext) -> torch.Tensor:
        """x [T, D] -> [T, D]; each sequence's keys and values are appended to its cache."""
        of_qk, v = self.qkv_proj(x, ctx)
        of_qk, v = self._normed(of_qk, ctx), v.unflatten(-1, (-1, self.head_dim))
        rope = ropes.local if self.local else ropes.full
        if rope is not None:
            of_qk = rope.rotate(of_qk)
        mixed = self._mixed(of_qk[:, : self._queries], of_qk[:, self._queries :], v, batch, ctx)
        out: torch.Tensor = self.o_proj(mixed.flatten(1), ctx)
        return out

    def _mixed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch, ctx: StepContext) -> torch.Tensor:
        """The values [T, H, d] that each sequence's queries find in its past."""
        if len(batch.sequences) == 1:
            return self._mixed_of(q, k, v, batch.sequences[0], ctx)
        mixed = torch.empty_like(q)
        for sequence in batch.sequences:
            rows = slice(sequence.start, sequence.stop)
            mixed[rows] = self._mixed_of(q[rows], k[rows], v[rows], sequence, ctx)
        return mixed

    def _mixed_of(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequence: BatchSequence, ctx: StepContext
    ) -> torch.Tensor:
        """The same for one sequence, whose keys and values are appended to its cache first."""
        sequence.cache.append(self.layer, k.transpose(0, 1), v.transpose(0, 1))
        return self._attend_past(q.transpose(0, 1), sequence, ctx).transpose(0, 1)

    def _attend_past(self, q: torch.Tensor, sequence: BatchSequence, ctx: StepContext) -> torch.Tensor:
        """q [H, n, d] over what its windows reach of the sequence, some heads after the others where they are decoded.

        A head's result does not depend on which others are computed with it.
        """
        length, share, mixed = sequence.length, q.shape[0] // sequence.cache.num_heads, []
        start = first_reached(length, count=q.shape[1], window=self.scores.window)
        for heads, keys, values in sequence.cache.runs(self.layer, start=start, stop=length):
            part = q[heads.start * share : heads.stop * share]
            sinks = parameter(self, "sinks")[heads.start * share : heads.stop * share] if self._has_sinks else None
            mixed.append(self._attend(part, keys, values, sinks, ctx))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sinks: torch.Tensor | None,
        ctx: StepContext,
    ) -> torch.Tensor:
        window, scale, cap = self.scores.window, self.scores.scale, self.scores.softcap
        if sinks is not None:
            return attend_with_sinks(q, keys, values, sinks, window=window, scale=scale, kernels=ctx.kernels)
        if cap is None:
            return attend(q, keys, values, window=window, scale=scale)
        return attend_capped(q, keys, values, window=window, scale=scale, cap=cap, kernels=ctx.kernels)

    def _normed(self, of_qk: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """Queries and keys [T, rows] by heads: [T, H + G, d]."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is not None and self.whole:
            rows = self._queries * self.head_dim
            of_qk = torch.cat(self._normed_whole(of_qk[:, :rows], of_qk[:, rows:], ctx.groups.tensor), dim=-1)
        heads: torch.Tensor = of_qk.unflatten(-1, (-1, self.head_dim))
        if q_norm is None or k_norm is None or self.whole:
            return heads
        return norm_heads(heads, self._queries, q_norm, k_norm)

    def _normed_whole(self, q: torch.Tensor, k: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        """All heads together, those of other ranks too."""
        assert self.q_norm is not None
        assert self.k_norm is not None
        if group.size == 1:
            return self.q_norm(q), self.k_norm(k)
        of_q, of_k = shared_variances((q, k), group)
        return self.q_norm(q, of_q), self.k_norm(k, of_k)


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, window: int | None, scale: float | None = None
) -> torch.Tensor:
    """softmax(scale q k^T) v, causal: q [H, n, d] are the last n of the S positions of keys and values [G, S, d].

    Returns [H, n, d]. `scale` is 1 / sqrt(d) where it is None. The softmax is float32 inside the kernel.
    """
    heads, count, width = q.shape
    keys, values = reached(keys, values, count=count, window=window)
    groups, length = keys.shape[:2]
    if count == 1:  # every key left is seen: the query heads of a group become the rows of one product
        packed = q.reshape(groups, heads // groups, width)
        return _products(packed, keys, values, scale).reshape(heads, 1, width)
    masked = count < length or (window is not None and length > window)
    mask = causal_mask(count, length, window=window, device=q.device) if masked else None
    return _products(q, keys, values, scale, mask=mask, causal=mask is None)


def _products(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float | None,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    gqa = q.shape[0] != keys.shape[0]
    return functional.scaled_dot_product_attention(
        q[None], keys[None], values[None], attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa
    )[0]

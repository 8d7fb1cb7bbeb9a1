"""Softcapping: numbers kept between -cap and cap by cap * tanh(x / cap), and attention whose scores are capped so.

The fused attention of torch knows no cap, so here its steps stand one by one: products, scores and softmax in float32,
for as many query rows at a time as make a bounded matrix of scores. H query heads, G key/value heads, n new positions,
S all of them, d head_dim.
"""

from __future__ import annotations

import torch

from layers.causal_mask import causal_mask, reached
from layers.mlp import uncut_pieces
from quant.kernels import Kernels

SCORES = 1 << 20  # numbers of one matrix of scores


def soft_cap(x: torch.Tensor, *, cap: float, scale: float = 1.0) -> torch.Tensor:
    """cap * tanh(scale * x / cap) in place of x, float [rows, columns]; the same bits for any number of threads."""
    pieces = [(slice(None), slice(None))] if x.device.type != "cpu" else uncut_pieces(*x.shape)
    for piece in pieces:
        x[piece].mul_(scale).div_(cap).tanh_().mul_(cap)
    return x


def attend_capped(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    window: int | None,
    scale: float | None,
    cap: float,
    kernels: Kernels,
) -> torch.Tensor:
    """softmax(cap * tanh(scale * q k^T / cap)) v, causal: q [H, n, d] are the last n of the S positions of keys and
    values [G, S, d].

    Returns [H, n, d] in q's dtype. `scale` is 1 / sqrt(d) where it is None.
    """
    heads, count, width = q.shape
    keys, values = reached(keys, values, count=count, window=window)
    groups, length = keys.shape[:2]
    scale = width**-0.5 if scale is None else scale
    hidden = ~causal_mask(count, length, window=window, device=q.device)  # [n, S]
    rows = q.float().reshape(groups, -1, width)  # the query heads of a group one after the other
    out = torch.empty_like(rows)
    step = max(1, SCORES // length)
    for group in range(groups):
        key, value = keys[group].float().contiguous(), values[group].float().t().contiguous()  # [S, d], [d, S]
        for start in range(0, rows.shape[1], step):
            part = slice(start, min(rows.shape[1], start + step))
            scores = soft_cap(kernels.wide(rows[group, part], key, None), cap=cap, scale=scale)
            queries = torch.arange(part.start, part.stop, device=q.device) % count
            scores.masked_fill_(hidden[queries], float("-inf"))
            out[group, part] = kernels.wide(scores.softmax(-1), value, None)
    return out.view(heads, count, width).to(q.dtype)

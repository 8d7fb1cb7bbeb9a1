"""Softcapping: numbers kept between -cap and cap by cap * tanh(x / cap), and attention whose scores are capped so.

H query heads, G key/value heads, n new positions, S all of them, d head_dim.
"""

from __future__ import annotations

from functools import partial

import torch

from layers.mlp import uncut_pieces
from layers.scored_attention import attend_scored
from quant.kernels import Kernels


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
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attend_scored(q, keys, values, window=window, score=partial(soft_cap, cap=cap, scale=scale), kernels=kernels)

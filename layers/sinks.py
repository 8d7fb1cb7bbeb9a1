"""Attention with sinks: each head has a learned score that takes part in its softmax and that no value belongs to, so
that a query may attend to nothing (Xiao et al. 2023, arXiv:2309.17453, with a learned score in place of a token).

H query heads, G key/value heads, n new positions, S all of them, d head_dim.
"""

from __future__ import annotations

import torch

from layers.scored_attention import attend_scored
from quant.kernels import Kernels


def attend_with_sinks(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor,
    *,
    window: int | None,
    scale: float | None,
    kernels: Kernels,
) -> torch.Tensor:
    """softmax of the scores scale * q k^T and the head's sink [H], without the sink's share, times v; causal: q
    [H, n, d] are the last n of the S positions of keys and values [G, S, d].

    Returns [H, n, d] in q's dtype. `scale` is 1 / sqrt(d) where it is None.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale

    def scaled(products: torch.Tensor) -> torch.Tensor:
        return products.mul_(factor)

    return attend_scored(q, keys, values, window=window, score=scaled, kernels=kernels, sinks=sinks)

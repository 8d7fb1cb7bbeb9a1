"""Attention whose scores are more than products: its steps stand one by one, where torch's fused attention has no word
for what lies between them.

Products, scores and softmax are float32, for as many query rows at a time as make a bounded matrix of scores. A row's
bits depend neither on the number of threads nor on how many heads are computed with it. H query heads, G key/value
heads, n new positions, S all of them, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from layers.causal_mask import causal_mask, reached
from quant.kernels import Kernels

SCORES = 1 << 20  # numbers of one matrix of scores


def attend_scored(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    window: int | None,
    score: Callable[[torch.Tensor], torch.Tensor],
    kernels: Kernels,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(score(q k^T)) v, causal: q [H, n, d] are the last n of the S positions of keys and values [G, S, d].

    `score` changes products, float32 [r, S], in place and returns them. `sinks` [H]: one more score for each query of
    a head, that no value belongs to. Returns [H, n, d] in q's dtype.
    """
    heads, count, width = q.shape
    keys, values = reached(keys, values, count=count, window=window)
    groups, length = keys.shape[:2]
    hidden = ~causal_mask(count, length, window=window, device=q.device)  # [n, S]
    rows = q.float().reshape(groups, -1, width)  # the query heads of a group one after the other
    drains = None if sinks is None else sinks.float().view(groups, -1, 1)  # [G, H / G, 1]
    out = torch.empty_like(rows)
    step = max(1, SCORES // length)
    for group in range(groups):
        key, value = keys[group].float().contiguous(), values[group].float().t().contiguous()  # [S, d], [d, S]
        for start in range(0, rows.shape[1], step):
            part = slice(start, min(rows.shape[1], start + step))
            scores = score(kernels.wide(rows[group, part], key, None))
            places = torch.arange(part.start, part.stop, device=q.device)
            scores.masked_fill_(hidden[places % count], float("-inf"))
            drain = None if drains is None else drains[group, places // count]
            out[group, part] = kernels.wide(_shares(scores, drain), value, None)
    return out.view(heads, count, width).to(q.dtype)


def _shares(scores: torch.Tensor, drain: torch.Tensor | None) -> torch.Tensor:
    """The softmax of scores [r, S]; with a drain [r, 1] they add up to less than one."""
    if drain is None:
        return scores.softmax(-1)
    return torch.cat((scores, drain), -1).softmax(-1)[:, :-1]

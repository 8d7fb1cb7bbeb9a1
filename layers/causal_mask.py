"""Which positions a query sees: those up to its own, or as many of them as a window holds.

n new positions, the last of S; keys and values [G, S, d].
"""

from __future__ import annotations

import torch


def reached(
    keys: torch.Tensor, values: torch.Tensor, *, count: int, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values without the positions that no window of the last `count` queries reaches."""
    first = first_reached(keys.shape[1], count=count, window=window)
    return (keys[:, first:], values[:, first:]) if first else (keys, values)


def first_reached(length: int, *, count: int, window: int | None) -> int:
    """The first of `length` positions that a window of the last `count` queries reaches."""
    return 0 if window is None else max(0, length - (window + count - 1))


def causal_mask(count: int, length: int, *, window: int | None, device: torch.device) -> torch.Tensor:
    """bool [count, length], true where the query of row i (at position length - count + i) sees the key of column j."""
    queries = torch.arange(length - count, length, device=device)[:, None]
    keys = torch.arange(length, device=device)[None]
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)

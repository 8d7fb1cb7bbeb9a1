"""Wide numbers to symmetric int8, strip by strip through a small buffer that stays in the cache. R rows."""

from __future__ import annotations

import torch

from quant.float8_codec import strips, widened
from quant.panels import Workspace

LARGEST = 127.0


def scale_of(amax: torch.Tensor) -> torch.Tensor:
    """amax / 127 in float32; 1 where that is zero."""
    scale = amax.float() / LARGEST
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def encode_rows(weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, workspace: Workspace) -> None:
    """out[r] = round(weight[r] / scale[r]), half to even, in float32; scale [R]."""
    for start, stop in strips(weight):
        wide = widened(weight[start:stop], workspace)
        wide.div_(scale[start:stop].unsqueeze(1)).round_().clamp_(-LARGEST, LARGEST)
        out[start:stop].copy_(wide)

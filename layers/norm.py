"""Root-mean-square normalization (Zhang and Sennrich 2019, arXiv:1910.07467), rounded where transformers rounds."""

from __future__ import annotations

import torch
from torch import nn

from layers.linear import declare
from layers.weights import ParamSpec


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim: the quotient in float32, the product in x's dtype."""

    def __init__(self, weight: ParamSpec, *, eps: float) -> None:
        super().__init__()
        declare(self, weight)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> the same shape and dtype."""
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.get_parameter("weight") * (wide * torch.rsqrt(variance + self.eps)).to(x.dtype)

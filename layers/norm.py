"""The norms, rounded where transformers rounds. Weights and biases are [D] unless another shape is named.

Root-mean-square: Zhang and Sennrich 2019, arXiv:1910.07467. Layer norm: Ba et al. 2016, arXiv:1607.06450.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import nn
from torch.nn import functional

from layers.model_config import NormKind
from layers.parallel import Group
from layers.parameters import declare, parameter
from layers.weights import ParamSpec


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; `kind` says where the product is rounded."""

    def __init__(self, weight: ParamSpec, *, eps: float, kind: NormKind = NormKind.RMS) -> None:
        super().__init__()
        declare(self, weight)
        self.eps = eps
        self.kind = kind

    def forward(self, x: torch.Tensor, variance: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., D] -> the same shape and dtype. `variance`: float32 means of squares [..., 1] that are not those of x
        alone (see `shared_variances`)."""
        weight = parameter(self, "weight")
        if self.kind is NormKind.RMS:
            return weight * unweighted(x, eps=self.eps, variance=variance)
        normed = unweighted(x.to(torch.float32), eps=self.eps, variance=variance)
        if self.kind is NormKind.RMS_PLUS_ONE:
            return (normed * (1.0 + weight.float())).to(x.dtype)
        return (weight * normed).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim, float32 inside."""

    def __init__(self, weight: ParamSpec, bias: ParamSpec | None, *, eps: float) -> None:
        super().__init__()
        declare(self, weight)
        if bias is not None:
            declare(self, bias)
        self.eps = eps
        self._has_bias = bias is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> the same shape and dtype."""
        weight, bias = parameter(self, "weight"), parameter(self, "bias") if self._has_bias else None
        return functional.layer_norm(x, x.shape[-1:], weight, bias, self.eps)


class LayerNormPerHead(nn.Module):
    """A layer norm of each head with a weight of its own: [heads, head_dim], or one head's after the other."""

    def __init__(self, weight: ParamSpec, *, eps: float) -> None:
        super().__init__()
        declare(self, weight)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, heads, head_dim] -> the same shape and dtype."""
        normed = functional.layer_norm(x.float(), x.shape[-1:], None, None, self.eps)
        return (normed * parameter(self, "weight").float().view(x.shape[-2:])).to(x.dtype)


def unweighted(x: torch.Tensor, *, eps: float, variance: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., D] / sqrt(mean(x^2) + eps), rounded to x's dtype; `variance` as in `RMSNorm.forward`.

    On a CPU torch's own operator takes these steps one after the other, with the same bits (compared for all dtypes).
    """
    if variance is None and x.device.type == "cpu":
        return torch.rms_norm(x, x.shape[-1:], None, eps)
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt((mean_square(wide) if variance is None else variance) + eps)).to(x.dtype)


def norm_heads(heads: torch.Tensor, count: int, first: nn.Module, rest: nn.Module) -> torch.Tensor:
    """heads [T, N, d], each normed by itself: `count` of them by one norm, the rest by another one."""
    if not _are_alike(first, rest):
        return torch.cat((first(heads[:, :count]), rest(heads[:, count:])), dim=1)
    normed = unweighted(heads, eps=first.eps)
    normed[:, :count].mul_(parameter(first, "weight"))
    normed[:, count:].mul_(parameter(rest, "weight"))
    return normed


def _are_alike(first: nn.Module, second: nn.Module) -> TypeGuard[RMSNorm]:
    """Whether both differ in their weights alone, which multiply what is rounded."""
    if not isinstance(first, RMSNorm) or not isinstance(second, RMSNorm):
        return False
    return first.kind is second.kind is NormKind.RMS and first.eps == second.eps


def mean_square(wide: torch.Tensor) -> torch.Tensor:
    """The mean of the squares of float32 numbers [..., D]: [..., 1]."""
    return wide.pow(2).mean(-1, keepdim=True)


def shared_variances(parts: Sequence[torch.Tensor], group: Group) -> tuple[torch.Tensor, ...]:
    """Means of squares over whole vectors of which each rank of the group has a part: of each of `parts` [T, D], which
    are of one length on all ranks, float32 [T, 1].

    What several ranks have alike counts as often in the sum as in what it is divided by.
    """
    own = torch.cat([mean_square(part.float()) for part in parts], dim=-1)
    shared = group.all_reduce(own) / group.size
    return tuple(shared[:, index : index + 1] for index in range(len(parts)))


def make_norm(weight: ParamSpec, bias: ParamSpec | None, *, kind: NormKind, eps: float) -> nn.Module:
    """The norm of this kind."""
    if kind is NormKind.LAYER:
        return LayerNorm(weight, bias, eps=eps)
    return RMSNorm(weight, eps=eps, kind=kind)

"""Which matmul runs: a function of scheme, rows, device, dtype, features and mode, never of what has finished."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F


class KernelMode(Enum):
    """How freely a matmul may be chosen."""

    DEFAULT = "default"  # the fastest whose bits do not depend on the number of threads
    FAST = "fast"  # packed and low-precision forms, other bits than DEFAULT
    EXACT = "exact"  # the reference: dequantize, then a plain matmul


@dataclass(frozen=True)
class Kernels:
    """The choice of matmuls for one model."""

    mode: KernelMode = KernelMode.DEFAULT

    @classmethod
    def detect(cls, *, mode: KernelMode = KernelMode.DEFAULT) -> Kernels:
        """Kernels for this machine."""
        return cls(mode=mode)

    def wide(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., I], weight [O, I] wide -> [..., O] in x's dtype."""
        return F.linear(x, weight.to(x.dtype), bias)

"""What a scheme makes of a weight, as a load does: each section into its part of the stored tensors."""

from __future__ import annotations

import math

import torch

from quant.dtypes import DType, to_torch
from quant.scheme import Scheme


def quantized(scheme: Scheme, weight: torch.Tensor, sections: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The stored tensors of a wide weight [O, I], filled with 77 first, so that gaps would be seen."""
    specs = scheme.storage(sections, weight.shape[1], wide=DType.BF16)
    stored = {
        name: torch.full((math.prod(spec.shape) * spec.dtype.itemsize,), 77, dtype=torch.uint8)
        .view(to_torch(spec.dtype))
        .view(spec.shape)
        for name, spec in specs.items()
    }
    for index, rows in enumerate(weight.split(list(sections))):
        scheme.quantize_into(rows, scheme.section_views(stored, sections, index))
    return stored

"""Rows of tokens in the order of their experts, products of all experts at once, and the sum of what they give a token.

R rows, E experts of O outputs and I inputs each; n tokens, k experts for each, D hidden size.

Torch's grouped product takes the place of a loop over the experts on GPUs that have a kernel for it. On a CPU it is
such a loop itself, over products whose bits change with the number of threads (measured: from 33 rows of an expert on),
so there the experts go one by one through the panels of quant.kernels. One thread, bfloat16 with instructions of its
own, 64 experts of 512 by 1024, k = 8, ms in our loop and in torch's: 1 token 3.7 and 4.1, 16 tokens 32 and 32, 64
tokens 53 and 42, 512 tokens 97 and 82 (medians of 15, in turns).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from quant.device_features import DeviceFeatures
from quant.kernels import KernelMode, Kernels

GROUPED_NBYTES = 128 << 20  # of rows that go through all experts at once
STRIDE_NBYTES = 16  # torch's grouped product takes rows whose length is a multiple of it


@dataclass(frozen=True)
class ExpertRows:
    """The order [R] that brings rows to their experts, the expert [R] of each row then, and int32 `stops` [E]: how many
    rows there are up to the end of each expert's."""

    order: torch.Tensor
    experts: torch.Tensor
    stops: torch.Tensor


def by_expert(experts: torch.Tensor, *, count: int) -> ExpertRows:
    """The rows whose experts are int64 [R], of `count` experts. Nothing is read on the host."""
    ordered, order = experts.sort(stable=True)
    stops = torch.searchsorted(ordered, torch.arange(1, count + 1, device=experts.device))
    return ExpertRows(order, ordered, stops.to(torch.int32))


def grouped_product(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, order: ExpertRows
) -> torch.Tensor:
    """rows [R, I], already in their order, each times its expert's weight of [E * O, I], plus its bias of [E * O]:
    [R, O]."""
    count = order.stops.shape[0]
    out = functional.grouped_mm(rows, weight.unflatten(0, (count, -1)).transpose(1, 2), offs=order.stops)
    return out if bias is None else out.add_(bias.unflatten(0, (count, -1))[order.experts])


def is_grouped(x: torch.Tensor, sizes: tuple[int, ...], *, dtype: torch.dtype, kernels: Kernels) -> bool:
    """Whether experts with wide weights of `dtype`, whose rows have these `sizes`, multiply x at once."""
    if x.device.type != "cuda" or kernels.mode is KernelMode.EXACT:
        return False
    return DeviceFeatures.detect(x.device, triton=False).at_least(9, 0) and fits_groups(sizes, x.dtype, dtype)


def fits_groups(sizes: tuple[int, ...], x_dtype: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether torch's grouped product takes such rows."""
    aligned = all(size * dtype.itemsize % STRIDE_NBYTES == 0 for size in sizes)
    return x_dtype == dtype == torch.bfloat16 and aligned


def rows_at_once(width: int, *, itemsize: int) -> int:
    """How many rows of `width` numbers go through the experts at once."""
    return max(1, GROUPED_NBYTES // (width * itemsize))


def weighed(results: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """results [n, k, D] of the experts chosen [n, k], each times its weight and rounded, added in the order of the
    experts' numbers: [n, D]."""
    out = results.new_zeros(results.shape[0], results.shape[2])
    tokens = torch.arange(out.shape[0], device=out.device)
    for place in chosen.argsort(dim=-1).unbind(1):
        made = results[tokens, place] * weights[tokens, place].unsqueeze(1)
        out += made.to(out.dtype)
    return out

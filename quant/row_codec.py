"""Rows of numbers to 8-bit codes with a float32 scale for each row, or one for all: strip by strip, so that a strip's
scale and codes are made while its numbers are in the cache. R rows, I input features.

Scale = magnitude / largest code; code = weight / scale in float32, exactly rounded (a product with the reciprocal is
not: it differs wherever the quotient is a tie), rounded to the nearest code, to even. What lies beyond the largest code
becomes the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quant.magnitudes import row_magnitudes, strips, tensor_magnitude
from quant.panels import Workspace

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""write(wide, scale, out): the codes of a float32 strip [r, I], which is overwritten; scale [r, 1], [1, 1] or [I]."""
MakeWrite = Callable[[tuple[int, int], torch.device], Write]
"""A `Write` for strips of at most this shape on this device."""


@dataclass(frozen=True)
class RowCodec:
    """One kind of code. `within` makes the fast way for quotients that exceed `largest` by rounding alone (and not
    beside a scale that is NaN); `saturating` makes one that takes all."""

    largest: float
    within: MakeWrite
    saturating: MakeWrite

    def quantize_rows(
        self, weight: torch.Tensor, *, out: torch.Tensor, scale: torch.Tensor, percentile: float | None
    ) -> None:
        """A scale [R] for each row of a wide [R, I], and its codes."""
        workspace = Workspace()
        magnitudes = row_magnitudes(weight, workspace, percentile=percentile)
        scale.copy_(scale_of(magnitudes, largest=self.largest))
        self.encode(weight, out=out, scale=scale, workspace=workspace, within=percentile is None)

    def quantize_tensor(
        self, weight: torch.Tensor, *, out: torch.Tensor, scale: torch.Tensor, percentile: float | None
    ) -> None:
        """One scale [1] for all of a wide [R, I], and its codes."""
        workspace = Workspace()
        magnitude = tensor_magnitude(weight, workspace, percentile=percentile)
        scale.copy_(scale_of(magnitude, largest=self.largest))
        self.encode(weight, out=out, scale=scale, workspace=workspace, within=percentile is None)

    def quantize_under(
        self, weight: torch.Tensor, *, out: torch.Tensor, scale: torch.Tensor, magnitudes: torch.Tensor
    ) -> None:
        """The same of largest magnitudes that are known, float32 [R] or [1], and no number of `weight` exceeds."""
        scale.copy_(scale_of(magnitudes, largest=self.largest))
        self.encode(weight, out=out, scale=scale, workspace=Workspace(), within=True)

    def encode(
        self, weight: torch.Tensor, *, out: torch.Tensor, scale: torch.Tensor, workspace: Workspace, within: bool
    ) -> None:
        """The codes of a wide [R, I] under its scales, [R] or [1]; `within`: they are made from the largest."""
        bounds = strips(weight)
        write = self.write(weight, scale, within=within, rows=bounds[0][1] if bounds else 0)
        for start, stop in bounds:
            own = scale[start:stop, None] if scale.numel() > 1 else scale[:, None]
            write(widened(weight[start:stop], workspace), own, out[start:stop])

    def write(self, weight: torch.Tensor, scale: torch.Tensor, *, within: bool, rows: int) -> Write:
        """What writes the codes of at most so many rows at a time."""
        make = self.within if within and quotients_fit(scale) else self.saturating
        return make((rows, weight.shape[1]), weight.device)


def scale_of(magnitude: torch.Tensor, *, largest: float) -> torch.Tensor:
    """magnitude / largest in float32; 1 where that is zero, so that rows of zeros become zeros and no NaN."""
    scale = magnitude.float() / largest
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def quotients_fit(scale: torch.Tensor) -> bool:
    """Whether no scale from a largest magnitude is NaN, or so small (below the normal numbers) that its own rounding
    lets quotients exceed the largest code. Never on a device, which would have to be waited for."""
    return scale.device.type == "cpu" and bool((scale >= torch.finfo(torch.float32).tiny).all())


def widened(part: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """A float32 copy: in a reused buffer on the CPU, in the allocator's memory (which reuses its own) on a device."""
    if part.device.type != "cpu":
        return part.to(torch.float32, copy=True)
    return workspace.take("widened", tuple(part.shape), torch.float32).copy_(part)

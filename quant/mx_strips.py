"""Microscaled weights as strips of wide numbers, for products that multiply strip by strip.

A code times an MX scale, or an E2M1 code times an E4M3 scale, has at most six significant bits: strips in bfloat16 are
exact. r rows of a strip, O output rows, I input features, B numbers a block, G = ceil(I / B).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quant import e2m1, e8m0, float8_codec
from quant.mx_codec import decode, e4m3_numbers, multiply_blocks
from quant.panels import Workspace


@dataclass(frozen=True)
class ScaledBlocks:
    """A weight's stored tensors: weight e4m3fn [O, I] or uint8 [O, ceil(I / 2)] (E2M1 nibbles), scale e8m0 or e4m3fn
    [O, G], and float32 [O] that rows are multiplied by, or None."""

    weight: torch.Tensor
    scale: torch.Tensor
    block: int
    row_scale: torch.Tensor | None = None

    def widen(self, start: int, stop: int, out: torch.Tensor, workspace: Workspace) -> None:
        """Write rows [start, stop), not multiplied by row_scale, into a wide strip [stop - start, I] on the CPU.

        MX scales of e4m3fn codes are exact up to code 246, the largest that quantization writes; beyond it the strip
        may become infinite, and so does not hide them.
        """
        weight, scale = self.weight[start:stop], self._scales(start, stop)
        nibbles = weight.dtype == torch.uint8
        width = 2 * weight.shape[1] if nibbles else weight.shape[1]
        whole = out.dtype == torch.float32 and out.shape[1] == width
        wide = out if whole else workspace.take("blocks", (out.shape[0], width), torch.float32)
        if nibbles:
            e2m1.expand(weight, wide, workspace)
        else:
            float8_codec.expand(weight, wide, workspace)
            scale.mul_(float8_codec.EXPANDED)
        multiply_blocks(wide, scale, block=self.block)
        if not whole:
            out.copy_(wide[:, : out.shape[1]])

    def _scales(self, start: int, stop: int) -> torch.Tensor:
        codes = self.scale[start:stop]
        return e4m3_numbers(codes) if codes.dtype == torch.float8_e4m3fn else e8m0.numbers(codes)

    def on_device(self, columns: int) -> Callable[[int, int], torch.Tensor]:
        """The function that gives float32 rows [start, stop), for products on a device."""

        def widen(start: int, stop: int) -> torch.Tensor:
            wide = decode(self.weight[start:stop], self.scale[start:stop], block=self.block, in_features=columns)
            return wide if self.row_scale is None else wide.mul_(self.row_scale[start:stop].unsqueeze(1))

        return widen

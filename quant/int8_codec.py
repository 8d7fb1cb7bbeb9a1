"""Wide numbers to symmetric int8: round(wide / scale), half to even, in float32, from -127 to 127."""

from __future__ import annotations

import torch

from quant.row_codec import RowCodec, Write

LARGEST = 127.0
_ROUNDING = 1.5 * 2**23  # added to a float32 below 2^22, leaves its nearest integer in the low bits, ties to even


def _within(shape: tuple[int, int], device: torch.device) -> Write:
    """Divided and rounded in one pass; the low byte of the sum is the code."""
    if device.type != "cpu":
        return _saturating(shape, device)
    rounding = torch.full(shape, _ROUNDING)

    def write(wide: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        torch.addcdiv(rounding[: wide.shape[0]], wide, scale, out=wide)
        out.copy_(wide.view(torch.int32))

    return write


def _saturating(shape: tuple[int, int], device: torch.device) -> Write:
    """NaN becomes 0: its scale is NaN or infinite."""

    def write(wide: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(wide.div_(scale).round_().clamp_(-LARGEST, LARGEST).nan_to_num_(0.0))

    return write


INT8 = RowCodec(LARGEST, _within, _saturating)

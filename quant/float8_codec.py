"""float8_e4m3fn to wide numbers and back, strip by strip through small buffers that stay in the cache.

Format (OCP 8-bit floating point, 2023): sign, 4 exponent bits (bias 7), 3 mantissa bits; 448 is the largest number,
0x7F and 0xFF are NaN. There is no infinity. R rows, I input features.
"""

from __future__ import annotations

import torch

from quant.panels import Workspace
from quant.row_codec import RowCodec, Write

LARGEST = 448.0
EXPANDED = 256.0  # a byte's bits, moved into a float16, stand for the number over 2^(15 - 7)
_SHIFT = 1 << 7  # as a product: multiplying integers is faster than shifting them
_KEEP = -0x4001  # every bit but the one where sign extension and the shift put the sign a second time


def expansion(dtype: torch.dtype) -> float:
    """`EXPANDED` for a dtype of codes: the same bits are half the number in e4m3fnuz (see quant.fnuz)."""
    return EXPANDED / 2 if dtype == torch.float8_e4m3fnuz else EXPANDED


def _within(shape: tuple[int, int], device: torch.device) -> Write:
    """out = e4m3fn(wide / scale); torch's cast makes NaN of what is beyond 448 by more than rounding."""

    def write(wide: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(wide.div_(scale))

    return write


def _saturating(shape: tuple[int, int], device: torch.device) -> Write:
    def write(wide: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(wide.div_(scale).clamp_(-LARGEST, LARGEST))

    return write


FLOAT8 = RowCodec(LARGEST, _within, _saturating)


def expand(stored: torch.Tensor, out: torch.Tensor, workspace: Workspace) -> None:
    """Write a strip's numbers divided by `expansion` into a wide `out` of the same shape; both on the CPU.

    By integer operations: torch's cast from float8 is ten times slower. Exact for every code but NaN, which
    quantization writes only beside a scale that is NaN or infinite itself.
    """
    half = workspace.take("expand", tuple(stored.shape), torch.int16)
    half.copy_(stored.view(torch.int8)).mul_(_SHIFT).bitwise_and_(_KEEP)
    if out.dtype == torch.bfloat16:  # by way of float32: torch's cast from float16 is slow
        middle = workspace.take("expand", tuple(stored.shape), torch.float32)
        middle.copy_(half.view(torch.float16))
        out.copy_(middle)
    else:
        out.copy_(half.view(torch.float16))

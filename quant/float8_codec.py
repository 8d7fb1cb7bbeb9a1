"""float8_e4m3fn to wide numbers and back, strip by strip through small buffers that stay in the cache.

Format (OCP 8-bit floating point, 2023): sign, 4 exponent bits (bias 7), 3 mantissa bits; 448 is the largest number,
0x7F and 0xFF are NaN. There is no infinity. R rows, I input features.
"""

from __future__ import annotations

import torch

from quant.panel_bounds import STRIP_NBYTES
from quant.panels import Workspace

LARGEST = 448.0
DEVICE_STRIP_NBYTES = 16 << 20  # of float32: launches are few, and little is held beside the result
EXPANDED = 256.0  # a byte's bits, moved into a float16, stand for the number over 2^(15 - 7)
_SHIFT = 1 << 7  # as a product: multiplying integers is faster than shifting them
_KEEP = -0x4001  # every bit but the one where sign extension and the shift put the sign a second time


def scale_of(amax: torch.Tensor) -> torch.Tensor:
    """amax / 448 in float32; 1 where that is zero, so that rows of zeros become zeros and no NaN."""
    scale = amax.float() / LARGEST
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def row_amax(weight: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """float32 [R]: the largest magnitude of each row of a wide [R, I]; NaN where the row holds one.

    Magnitudes of floats are ordered as their bits are (the sign bit cleared), and integers are reduced five times as
    fast as floats. A NaN's bits are above those of infinity, so it stays the largest.
    """
    integer = {2: torch.int16, 4: torch.int32}.get(weight.element_size())
    if weight.device.type != "cpu" or integer is None or weight.shape[1] == 0:
        return weight.abs().amax(1).float() if weight.shape[1] else weight.new_zeros(weight.shape[0]).float()
    largest = torch.empty(weight.shape[0], dtype=integer)
    mask = (1 << (8 * weight.element_size() - 1)) - 1
    for start, stop in strips(weight):
        bits = workspace.take("amax", (stop - start, weight.shape[1]), integer)
        torch.bitwise_and(weight[start:stop].view(integer), mask, out=bits)
        torch.amax(bits, 1, out=largest[start:stop])
    return largest.view(weight.dtype).float()


def strips(weight: torch.Tensor) -> list[tuple[int, int]]:
    """Runs of rows whose float32 form fits the strip buffer; on a device, fits what may be held beside the result."""
    nbytes = STRIP_NBYTES if weight.device.type == "cpu" else DEVICE_STRIP_NBYTES
    size = max(1, nbytes // (4 * max(1, weight.shape[1])))
    return [(row, min(weight.shape[0], row + size)) for row in range(0, weight.shape[0], size)]


def encode_rows(weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, workspace: Workspace) -> None:
    """out[r] = e4m3fn(weight[r] / scale[r]) in float32, to nearest even. scale float32 [R], or one number [1]."""
    for start, stop in strips(weight):
        wide = widened(weight[start:stop], workspace)
        wide.div_((scale[start:stop] if scale.numel() > 1 else scale).unsqueeze(1))
        out[start:stop].copy_(wide)


def widened(part: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """A float32 copy: in a reused buffer on the CPU, in the allocator's memory (which reuses its own) on a device."""
    if part.device.type != "cpu":
        return part.to(torch.float32, copy=True)
    return workspace.take("widened", tuple(part.shape), torch.float32).copy_(part)


def expand(stored: torch.Tensor, out: torch.Tensor, workspace: Workspace) -> None:
    """Write a strip's numbers divided by `EXPANDED` into a wide `out` of the same shape; both on the CPU.

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

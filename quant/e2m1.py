"""E2M1, four bits: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and the same with bit 3 set below zero. No infinity, no NaN.

Format: OCP Microscaling Formats (MX) 1.0, section 5.3.3. Two codes a byte, the even column's in the low nibble.
R rows, W numbers a row (an even number).
"""

from __future__ import annotations

import struct

import torch

from quant.panels import Workspace

POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS = POSITIVE + tuple(-number for number in POSITIVE)
LARGEST = 6.0
LARGEST_EXPONENT = 2  # of 4 and 6

# The two float32 numbers of every byte, low nibble first: one look-up gives both.
_PAIRS = struct.pack("=512f", *(number for byte in range(256) for number in (NUMBERS[byte & 15], NUMBERS[byte >> 4])))

_EXPONENT = 0x7F800000  # of a float32
_ONE = 127 << 23  # the bits of 1.0
# What turns the bits of 2^e into those of 1.5 * 2^(e + 22): a number that, added to one of [2^e, 2^(e + 1)), leaves
# room for one bit behind its leading one. The sum is rounded to nearest even there, by the addition itself.
_ALIGN = (22 << 23) + (1 << 22)
_BIAS = ((_ONE + _ALIGN) >> 22) & 0xFF  # of an exponent's last byte


def encode(magnitudes: torch.Tensor, signs: torch.Tensor, out: torch.Tensor, workspace: Workspace) -> None:
    """out uint8 [R, W / 2]: the codes nearest to float32 magnitudes [R, W], a tie to the even code, at most 6 (NaN
    gives any), with int8 signs [R, W] (0 or 8). Overwrites magnitudes and signs."""
    bits = magnitudes.view(torch.int32)
    align = buffer(workspace, "align", bits.shape, torch.int32, bits.device)
    torch.bitwise_and(bits, _EXPONENT, out=align)
    align.clamp_(_ONE, _ONE + (LARGEST_EXPONENT << 23)).add_(_ALIGN)  # below 1 the steps are as between 1 and 2
    magnitudes.add_(align.view(torch.float32))
    # The sum's last byte counts steps of half a power of two: 0 to 4 up to 2, then 2 to 4. Two steps are an exponent.
    codes = buffer(workspace, "codes", bits.shape, torch.int8, bits.device).copy_(bits)
    exponents = buffer(workspace, "exponents", bits.shape, torch.int8, bits.device)
    codes.add_(exponents.copy_(align.bitwise_right_shift_(22))).sub_(_BIAS).clamp_(0, len(POSITIVE) - 1)
    pairs = codes.bitwise_or_(signs).view(torch.int16)  # low byte: even column, high byte: odd
    high = torch.bitwise_right_shift(pairs, 4, out=signs.view(torch.int16))
    out.copy_(pairs.bitwise_or_(high))  # keeps the low byte


def take_signs(wide: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """int8 of the shape of float32 `wide`: 8 where its sign bit is set, else 0; `wide` becomes magnitudes."""
    bits = wide.view(torch.int32)
    top = buffer(workspace, "align", bits.shape, torch.int32, bits.device)
    torch.bitwise_right_shift(bits, 28, out=top)
    bits.bitwise_and_(0x7FFFFFFF)
    return buffer(workspace, "signs", bits.shape, torch.int8, bits.device).copy_(top).bitwise_and_(8)


def expand(stored: torch.Tensor, out: torch.Tensor, workspace: Workspace) -> None:
    """Write the numbers of uint8 [R, W / 2] into a contiguous float32 out [R, W]; both on the CPU."""
    indices = workspace.take("e2m1", tuple(stored.shape), torch.int32).copy_(stored)
    torch.index_select(_pairs(), 0, indices.view(-1), out=out.view(torch.int64).view(-1))


def numbers(stored: torch.Tensor) -> torch.Tensor:
    """float32 [..., W] of uint8 [..., W / 2], on any device."""
    pairs = _pairs().to(stored.device).index_select(0, stored.reshape(-1).int())
    return pairs.view(torch.float32).view(*stored.shape[:-1], 2 * stored.shape[-1])


def _pairs() -> torch.Tensor:
    return torch.frombuffer(bytearray(_PAIRS), dtype=torch.int64)


def buffer(
    workspace: Workspace, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Uninitialized memory: the workspace's on the CPU, the allocator's (which uses its own again) on a device."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return workspace.take(name, tuple(shape), dtype)

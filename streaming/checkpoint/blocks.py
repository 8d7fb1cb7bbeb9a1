"""GGUF's block encodings, decoded with torch operations, bit for bit as ggml's reference does in float32.

A block is a run of 32 or 256 values of one row: small integers, and one or more float16 factors. Layouts:
llama.cpp, ggml/src/ggml-common.h (`block_q4_0` ...); formulas: ggml/src/ggml-quants.c (`dequantize_row_*`).

N blocks, V values in a block. `blocks` is uint8 [N, block_nbytes]; `out` float32 [N, V], contiguous.

What is fast here is what stays contiguous: torch's element-wise loops run vectorized over whole tensors, and one run
at a time over anything with gaps. So each field is copied out of the blocks once, its bits are shifted as words of 64
(the mask removes what crosses from byte to byte) and laid side by side in the order of the values, and factors are
made contiguous before they multiply. Measured against the same with strided writes: 1.4 times as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Decoder = Callable[["Tensor", "Tensor"], None]

# multi-byte fields of a block, (offset, nbytes): a big-endian file holds them reversed
SWAPPED_FIELDS: Mapping[str, tuple[tuple[int, int], ...]] = MappingProxyType(
    {
        "Q4_0": ((0, 2),),
        "Q4_1": ((0, 2), (2, 2)),
        "Q5_0": ((0, 2), (2, 4)),
        "Q5_1": ((0, 2), (2, 2), (4, 4)),
        "Q8_0": ((0, 2),),
        "Q2_K": ((80, 2), (82, 2)),
        "Q3_K": ((108, 2),),
        "Q4_K": ((0, 2), (2, 2)),
        "Q5_K": ((0, 2), (2, 2)),
        "Q6_K": ((208, 2),),
    }
)


_NIBBLES, _PAIRS = (0, 4), (0, 2, 4, 6)  # shifts that take a byte apart


def swap_fields(blocks: Tensor, name: str) -> Tensor:
    """A big-endian file's blocks in the little-endian layout; a copy."""
    swapped = blocks.clone()
    for offset, nbytes in SWAPPED_FIELDS[name]:
        swapped[:, offset : offset + nbytes] = blocks[:, offset : offset + nbytes].flip(1)
    return swapped


def decode_blocks(blocks: Tensor, name: str, out: Tensor) -> None:
    """Fill `out` with the values of blocks of encoding `name`."""
    _DECODERS[name](blocks, out)


def _factor(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at `offset` of each block as float32 [N, 1]."""
    import torch

    return blocks.view(torch.float16)[:, offset // 2 : offset // 2 + 1].float()


def _field(blocks: Tensor, offset: int, nbytes: int, *, width: int | None = None) -> Tensor:
    """Bytes of each block as contiguous uint8 [N, nbytes], or [N * nbytes / width, width]."""
    return blocks[:, offset : offset + nbytes].contiguous().view(-1, width or nbytes)


def _words(packed: Tensor) -> Tensor:
    """Contiguous uint8 [..., w] as int64 (as int32 where w is no multiple of 8), for operations on bits."""
    import torch

    return packed.view(torch.int32 if packed.shape[-1] % 8 else torch.int64)


def _split(packed: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """`(packed >> shift) & mask` for each shift, side by side: uint8 [n, w] -> [n, w * len(shifts)]."""
    import torch

    words = _words(packed)
    bits = torch.cat([words >> shift if shift else words for shift in shifts], dim=1)
    return bits.bitwise_and_(mask * (0x01010101 if bits.dtype is torch.int32 else 0x0101010101010101)).view(torch.uint8)


def _join(low: Tensor, high: Tensor, shift: int) -> Tensor:
    """`low | high << shift` of contiguous uint8 tensors of one shape, whose bits do not meet."""
    import torch

    return (_words(low) | (_words(high) << shift)).view(torch.uint8)


def _spread(packed: Tensor) -> Tensor:
    """Each bit of each byte as 0 or 1, lowest bit first: uint8 [N, n] -> [N, 8 n]."""
    import torch

    bits = packed.to(torch.int64)
    # times 1 + 2^7 + ... + 2^42, bit i of the low seven is also at 8 i, and no two meet; the eighth goes by itself
    low = (bits & 0x7F).mul_(0x40810204081).bitwise_and_(0x01010101010101)
    return low.bitwise_or_(bits.bitwise_right_shift_(7).bitwise_left_shift_(56)).view(torch.uint8)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_split(_field(blocks, 2, 16), _NIBBLES, 15))
    out.sub_(8).mul_(_factor(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_split(_field(blocks, 4, 16), _NIBBLES, 15))
    out.mul_(_factor(blocks, 0)).add_(_factor(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_join(_split(_field(blocks, 6, 16), _NIBBLES, 15), _spread(_field(blocks, 2, 4)), 4))
    out.sub_(16).mul_(_factor(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    out.copy_(_join(_split(_field(blocks, 8, 16), _NIBBLES, 15), _spread(_field(blocks, 4, 4)), 4))
    out.mul_(_factor(blocks, 0)).add_(_factor(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    import torch

    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_factor(blocks, 0))


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    out.view(-1, 128).copy_(_split(_field(blocks, 16, 64, width=32), _PAIRS, 3))
    numbers = _split(_field(blocks, 0, 16), _NIBBLES, 15).float()
    _scale_groups(out, numbers[:, :16] * _factor(blocks, 80), numbers[:, 16:] * _factor(blocks, 82))


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    import torch

    low = _split(_field(blocks, 32, 64, width=32), _PAIRS, 3).view(-1, 256)
    high = _split(_field(blocks, 0, 32), tuple(range(8)), 1)
    out.copy_(_join(low, high, 2))
    out.sub_(4)  # the third bit says that 4 is *not* taken away
    scale_bytes = _field(blocks, 96, 12)
    low_scales = _split(scale_bytes[:, :8].contiguous(), _NIBBLES, 15)
    scales = _join(low_scales, _split(scale_bytes[:, 8:].contiguous(), _PAIRS, 3), 4)
    _scale_groups(out, (scales - 32).view(torch.int8).float() * _factor(blocks, 108))


def _six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """What multiplies and what is subtracted in each eighth of a block of Q4_K or Q5_K: float32 [N, 8] each.

    Bytes 0-3 and 4-7 of the 12 hold the first four scales and minima in their low six bits; their two high bits and
    the nibbles of bytes 8-11 hold the last four. Each is multiplied by its factor, float16 at 0 and at 2.
    """
    import torch

    scales, minima, rest = blocks.view(torch.int32)[:, 1:4].unbind(1)  # four bytes in each word
    words = (
        scales & 0x3F3F3F3F,
        (rest & 0x0F0F0F0F) | ((scales >> 2) & 0x30303030),
        minima & 0x3F3F3F3F,
        ((rest >> 4) & 0x0F0F0F0F) | ((minima >> 2) & 0x30303030),
    )
    numbers = torch.stack(words, dim=1).view(torch.uint8).float()
    return numbers[:, :8] * _factor(blocks, 0), numbers[:, 8:] * _factor(blocks, 2)


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    scales, minima = _six_bit_scales(blocks)
    out.view(-1, 64).copy_(_split(_field(blocks, 16, 128, width=32), _NIBBLES, 15))
    _scale_groups(out, scales, minima)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    scales, minima = _six_bit_scales(blocks)
    low = _split(_field(blocks, 48, 128, width=32), _NIBBLES, 15).view(-1, 256)
    out.copy_(_join(low, _split(_field(blocks, 16, 32), tuple(range(8)), 1), 4))
    _scale_groups(out, scales, minima)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    import torch

    low = _split(_field(blocks, 0, 128, width=64), _NIBBLES, 15)
    high = _split(_field(blocks, 128, 64, width=32), _PAIRS, 3)
    out.view(-1, 128).copy_(_join(low, high, 4))
    out.sub_(32)
    _scale_groups(out, _field(blocks, 192, 16).view(torch.int8).float() * _factor(blocks, 208))


def _scale_groups(out: Tensor, scales: Tensor, minima: Tensor | None = None) -> None:
    """Multiply each of the G groups of a block by its scale and subtract its minimum; both float32 [N, G]."""
    groups = out.view(*scales.shape, -1)
    groups.mul_(scales.unsqueeze(-1))
    if minima is not None:
        groups.sub_(minima.unsqueeze(-1))


_DECODERS: Mapping[str, Decoder] = MappingProxyType(
    {
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)

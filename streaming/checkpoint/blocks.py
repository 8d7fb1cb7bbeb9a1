"""GGUF's block encodings, decoded with torch operations, bit for bit as ggml's reference does in float32.

A block is a run of 32, 64 or 256 values of one row: small integers, and one or more float16 factors. Layouts:
llama.cpp, ggml/src/ggml-common.h (`block_q4_0` ...); formulas: ggml/src/ggml-quants.c (`dequantize_row_*`).

N blocks, V values in a block. `blocks` is uint8 [N, block_nbytes]; `out` float32 [N, V], contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from streaming.checkpoint.block_bits import NIBBLES, PAIRS, factor, field, join, scale_groups, split, spread
from streaming.checkpoint.codebook_blocks import iq4_nl, iq4_xs, mxfp4, nvfp4, tq1_0, tq2_0
from streaming.checkpoint.gguf_package import BY_PACKAGE, decode_by_package

if TYPE_CHECKING:
    from torch import Tensor

Decoder = Callable[["Tensor", "Tensor"], None]


def _words(offset: int, count: int) -> tuple[tuple[int, int], ...]:
    return tuple((offset + 2 * index, 2) for index in range(count))


def _longs(offset: int, count: int) -> tuple[tuple[int, int], ...]:
    return tuple((offset + 4 * index, 4) for index in range(count))


# Multi-byte fields of a block, (offset, nbytes): a big-endian file holds them reversed, as a big-endian machine writes
# them. IQ2_XXS has no such form (`encodings.LITTLE_ENDIAN_ONLY`).
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
        "IQ2_XS": _words(0, 33),
        "IQ2_S": ((0, 2),),
        "IQ3_XXS": ((0, 2), *_longs(66, 8)),
        "IQ3_S": ((0, 2),),
        "IQ1_S": ((0, 2), *_words(34, 8)),
        "IQ1_M": _words(48, 4),
        "IQ4_NL": ((0, 2),),
        "IQ4_XS": ((0, 2), (2, 2)),
        "TQ1_0": ((52, 2),),
        "TQ2_0": ((64, 2),),
        "MXFP4": (),
        "NVFP4": (),
    }
)


def swap_fields(blocks: Tensor, name: str) -> Tensor:
    """A big-endian file's blocks in the little-endian layout; a copy."""
    swapped = blocks.clone()
    for offset, nbytes in SWAPPED_FIELDS[name]:
        swapped[:, offset : offset + nbytes] = blocks[:, offset : offset + nbytes].flip(1)
    return swapped


def decode_blocks(blocks: Tensor, name: str, out: Tensor) -> None:
    """Fill `out` with the values of blocks of encoding `name`."""
    if name in BY_PACKAGE:
        decode_by_package(blocks, name, out)
    else:
        _DECODERS[name](blocks, out)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(split(field(blocks, 2, 16), NIBBLES, 15))
    out.sub_(8).mul_(factor(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    out.copy_(split(field(blocks, 4, 16), NIBBLES, 15))
    out.mul_(factor(blocks, 0)).add_(factor(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(join(split(field(blocks, 6, 16), NIBBLES, 15), spread(field(blocks, 2, 4)), 4))
    out.sub_(16).mul_(factor(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    out.copy_(join(split(field(blocks, 8, 16), NIBBLES, 15), spread(field(blocks, 4, 4)), 4))
    out.mul_(factor(blocks, 0)).add_(factor(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    import torch

    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(factor(blocks, 0))


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    out.view(-1, 128).copy_(split(field(blocks, 16, 64, width=32), PAIRS, 3))
    numbers = split(field(blocks, 0, 16), NIBBLES, 15).float()
    scale_groups(out, numbers[:, :16] * factor(blocks, 80), numbers[:, 16:] * factor(blocks, 82))


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    import torch

    low = split(field(blocks, 32, 64, width=32), PAIRS, 3).view(-1, 256)
    high = split(field(blocks, 0, 32), tuple(range(8)), 1)
    out.copy_(join(low, high, 2))
    out.sub_(4)  # the third bit says that 4 is *not* taken away
    scale_bytes = field(blocks, 96, 12)
    low_scales = split(field(scale_bytes, 0, 8), NIBBLES, 15)
    scales = join(low_scales, split(field(scale_bytes, 8, 4), PAIRS, 3), 4)
    scale_groups(out, (scales - 32).view(torch.int8).float() * factor(blocks, 108))


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
    return numbers[:, :8] * factor(blocks, 0), numbers[:, 8:] * factor(blocks, 2)


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    scales, minima = _six_bit_scales(blocks)
    out.view(-1, 64).copy_(split(field(blocks, 16, 128, width=32), NIBBLES, 15))
    scale_groups(out, scales, minima)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    scales, minima = _six_bit_scales(blocks)
    low = split(field(blocks, 48, 128, width=32), NIBBLES, 15).view(-1, 256)
    out.copy_(join(low, split(field(blocks, 16, 32), tuple(range(8)), 1), 4))
    scale_groups(out, scales, minima)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    import torch

    low = split(field(blocks, 0, 128, width=64), NIBBLES, 15)
    high = split(field(blocks, 128, 64, width=32), PAIRS, 3)
    out.view(-1, 128).copy_(join(low, high, 4))
    out.sub_(32)
    scale_groups(out, field(blocks, 192, 16).view(torch.int8).float() * factor(blocks, 208))


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
        "IQ4_NL": iq4_nl,
        "IQ4_XS": iq4_xs,
        "MXFP4": mxfp4,
        "NVFP4": nvfp4,
        "TQ1_0": tq1_0,
        "TQ2_0": tq2_0,
    }
)

"""Block encodings whose codes stand for numbers of a table (IQ4, MXFP4, NVFP4: sixteen values), and ternary ones.

Layouts: llama.cpp, ggml/src/ggml-common.h; formulas and tables: ggml/src/ggml-quants.c (`dequantize_row_iq4_nl`, ...).
Shapes as in `blocks`: N blocks, V values in a block; `blocks` uint8 [N, block_nbytes]; `out` float32 [N, V].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streaming.checkpoint.block_bits import NIBBLES, PAIRS, factor, field, scale_groups, split

if TYPE_CHECKING:
    from torch import Tensor

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # OCP microscaling formats, section 5.3.3
_HALVED_UE4M3 = tuple(
    0.0
    if code == 0x7F
    else 0.5 * (code & 7) * 2.0**-9
    if not code & 0x78
    else 0.5 * (1 + (code & 7) / 8) * 2.0 ** ((code >> 3 & 15) - 7)
    for code in range(256)
)  # fmt: skip  (ggml/src/ggml-impl.h, `ggml_ue4m3_to_fp32`: 0x7F is not a number there, and counts as 0)
_POWERS_OF_3 = (1, 3, 9, 27, 81)


def iq4_nl(blocks: Tensor, out: Tensor) -> None:
    """32 codes of 4 bits, one factor."""
    _look_up(split(field(blocks, 2, 16), NIBBLES, 15), _IQ4_VALUES, out)
    out.mul_(factor(blocks, 0))


def iq4_xs(blocks: Tensor, out: Tensor) -> None:
    """256 codes of 4 bits; a scale of 6 bits for each 32: four low bits and two high ones in fields of their own."""
    import torch

    _look_up(split(field(blocks, 8, 128, width=16), NIBBLES, 15).view(-1, 256), _IQ4_VALUES, out)
    low = field(blocks, 4, 4)
    low = torch.stack((low & 15, low >> 4), dim=2).view(-1, 8)
    high = field(blocks, 2, 2)  # scale i in bits 2 i of a little-endian word
    high = torch.stack([(high >> shift) & 3 for shift in PAIRS], dim=2).view(-1, 8)
    scales = (low | (high << 4)).float().sub_(32)
    scale_groups(out, scales.mul_(factor(blocks, 0)))


def mxfp4(blocks: Tensor, out: Tensor) -> None:
    """32 values of e2m1, one exponent of 8 bits; the table is doubled, so the exponent counts one less."""
    import torch

    _look_up(split(field(blocks, 1, 16), NIBBLES, 15), _E2M1_DOUBLED, out)
    exponent = blocks[:, :1].to(torch.int32)
    # below 2 the half of the power of two is a subnormal number of float32
    bits = torch.where(exponent < 2, exponent.new_tensor(0x00200000) << exponent, (exponent - 1) << 23)
    out.mul_(bits.view(torch.float32))


def nvfp4(blocks: Tensor, out: Tensor) -> None:
    """64 values of e2m1, and for each 16 of them an unsigned scale of e4m3, halved as the table is doubled."""
    import torch

    _look_up(split(field(blocks, 4, 32, width=8), NIBBLES, 15).view(-1, 64), _E2M1_DOUBLED, out)
    scales = torch.empty(blocks.shape[0], 4, dtype=torch.float32, device=blocks.device)
    _look_up(field(blocks, 0, 4), _HALVED_UE4M3, scales)
    scale_groups(out, scales)


def tq1_0(blocks: Tensor, out: Tensor) -> None:
    """256 ternary values: five in each of 48 bytes, four in each of 4; value i is digit i of the byte as a fraction."""
    import torch

    fields = ((0, 32, _POWERS_OF_3), (32, 16, _POWERS_OF_3), (48, 4, _POWERS_OF_3[:4]))
    shifted = [field(blocks, offset, nbytes) * power for offset, nbytes, powers in fields for power in powers]
    digits = (torch.cat(shifted, dim=1).to(torch.int16) * 3) >> 8
    out.copy_(digits)
    out.sub_(1).mul_(factor(blocks, 52))


def tq2_0(blocks: Tensor, out: Tensor) -> None:
    """256 ternary values of 2 bits, one factor."""
    out.view(-1, 128).copy_(split(field(blocks, 0, 64, width=32), PAIRS, 3))
    out.sub_(1).mul_(factor(blocks, 64))


def _look_up(codes: Tensor, values: tuple[float, ...], out: Tensor) -> None:
    """`values[code]` for each code; uint8 [N, V]."""
    import torch

    table = torch.tensor(values, dtype=torch.float32, device=codes.device)
    torch.index_select(table, 0, codes.view(-1).to(torch.int32), out=out.view(-1))

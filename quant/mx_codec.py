"""Wide numbers to blocks that share a scale, and back: mxfp8, mxfp4 (OCP Microscaling Formats 1.0) and nvfp4.

MX: blocks of 32 numbers of a row with one E8M0 scale 2^(floor(log2 amax) - the element type's largest exponent);
numbers over scale are rounded to nearest even and saturate. amax 0 gives scale code 0 (2^-127) and zeros; amax NaN or
infinite gives scale code 0xFF (NaN). nvfp4: blocks of 16 with an E4M3 scale, under one float32 scale for the section.

R rows, I input features, B numbers a block, G = ceil(I / B) blocks a row (the last may be short).
"""

from __future__ import annotations

from math import inf

import torch

from quant import e2m1, e8m0, float8_codec
from quant.magnitudes import strips, tensor_magnitude
from quant.microscaling import MX_BLOCK, NV_BLOCK
from quant.panels import Workspace

E4M3_LARGEST_EXPONENT = 8  # of 448
STRIP_NBYTES = 1 << 19  # of a strip in float32: two such forms stay in the second-level cache
_MAGNITUDE = 0x7FFFFFFF


def encode_mxfp8(weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Fill e8m0 scale [R, G] and e4m3fn out [R, I] from a wide [R, I]."""
    workspace, columns = Workspace(), weight.shape[1]
    for rows in _strips(weight):
        wide = _padded(weight[rows], MX_BLOCK, workspace)
        bits = wide.view(torch.int32)
        magnitudes = e2m1.buffer(workspace, "magnitudes", bits.shape, torch.int32, bits.device)
        torch.bitwise_and(bits, _MAGNITUDE, out=magnitudes)
        codes = e8m0.codes_of(_amax_bits(magnitudes, MX_BLOCK), largest_exponent=E4M3_LARGEST_EXPONENT)
        scale[rows].view(torch.uint8).copy_(codes[..., 0])
        _blocks(wide, MX_BLOCK).mul_(e8m0.reciprocal(codes))
        out[rows].copy_(wide.clamp_(-float8_codec.LARGEST, float8_codec.LARGEST)[:, :columns])


def encode_mxfp4(weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Fill e8m0 scale [R, G] and uint8 out [R, ceil(I / 2)] (E2M1 nibbles) from a wide [R, I]."""
    workspace = Workspace()
    for rows in _strips(weight):
        magnitudes = _padded(weight[rows], MX_BLOCK, workspace)
        signs = e2m1.take_signs(magnitudes, workspace)
        codes = e8m0.codes_of(_amax_bits(magnitudes, MX_BLOCK), largest_exponent=e2m1.LARGEST_EXPONENT)
        scale[rows].view(torch.uint8).copy_(codes[..., 0])
        _blocks(magnitudes, MX_BLOCK).mul_(e8m0.reciprocal(codes))
        _write_nibbles(magnitudes, signs, out[rows], workspace)


def encode_nvfp4(weight: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, out: torch.Tensor) -> None:
    """Fill float32 global_scale [1] = amax / (448 * 6), e4m3fn scale [R, G] = a block's amax / 6 over that, and uint8
    out [R, ceil(I / 2)] (E2M1 nibbles of number over both scales) from all rows of a section, wide [R, I].

    NaN or infinity anywhere makes the global scale NaN or infinite. A block whose scale rounds to 0 becomes zeros.
    """
    workspace = Workspace()
    whole = tensor_magnitude(weight, workspace) / (float8_codec.LARGEST * e2m1.LARGEST)
    global_scale.copy_(whole.masked_fill_(whole == 0, 1))
    for rows in _strips(weight):
        magnitudes = _padded(weight[rows], NV_BLOCK, workspace)
        signs = e2m1.take_signs(magnitudes, workspace)
        amax = _amax_bits(magnitudes, NV_BLOCK).view(torch.float32)
        ratio = (amax / e2m1.LARGEST).div_(global_scale).clamp_max_(float8_codec.LARGEST)
        scale[rows].copy_(ratio[..., 0])
        divisor = e4m3_numbers(scale[rows]).mul_(global_scale).unsqueeze(-1)
        _blocks(magnitudes, NV_BLOCK).div_(divisor.masked_fill_(divisor == 0, inf))
        _write_nibbles(magnitudes, signs, out[rows], workspace)


def _write_nibbles(magnitudes: torch.Tensor, signs: torch.Tensor, out: torch.Tensor, workspace: Workspace) -> None:
    """The codes of [r, G * B] into [r, ceil(I / 2)]."""
    if 2 * out.shape[1] == magnitudes.shape[1]:
        e2m1.encode(magnitudes, signs, out, workspace)
        return
    padded = out.new_empty(out.shape[0], magnitudes.shape[1] // 2)
    e2m1.encode(magnitudes, signs, padded, workspace)
    out.copy_(padded[:, : out.shape[1]])


def _strips(weight: torch.Tensor) -> list[slice]:
    return [slice(start, stop) for start, stop in strips(weight, nbytes=STRIP_NBYTES)]


def _padded(part: torch.Tensor, block: int, workspace: Workspace) -> torch.Tensor:
    """A float32 copy of [r, I], with zeros up to whole blocks: [r, G * B]."""
    columns = part.shape[1]
    shape = torch.Size((part.shape[0], -(-columns // block) * block))
    wide = e2m1.buffer(workspace, "wide", shape, torch.float32, part.device)
    wide[:, :columns].copy_(part)
    if columns < shape[1]:
        wide[:, columns:].zero_()
    return wide


def _amax_bits(magnitudes: torch.Tensor, block: int) -> torch.Tensor:
    """int32 [r, G, 1]: the bits of each block's largest of float32 magnitudes (or of their bits) [r, G * B].

    Magnitudes of floats are ordered as their bits are, NaN above all, and integers are reduced faster.
    """
    return _blocks(magnitudes.view(torch.int32), block).amax(-1, keepdim=True)


def _blocks(wide: torch.Tensor, block: int) -> torch.Tensor:
    return wide.view(*wide.shape[:-1], wide.shape[-1] // block, block)


# --- back to wide numbers: any leading dims, any device -------------------------------------------------------------


def decode(weight: torch.Tensor, scale: torch.Tensor, *, block: int, in_features: int) -> torch.Tensor:
    """float32 [..., I], code x scale: of e4m3fn weight [..., I] or uint8 [..., ceil(I / 2)] (E2M1 nibbles), and scale
    [..., G] in e4m3fn, E8M0 (float8_e8m0fnu or uint8) or float32."""
    numbers = e2m1.numbers(weight) if weight.dtype == torch.uint8 else weight.float()
    return multiply_blocks(numbers, _scale_numbers(scale), block=block)[..., :in_features]


def _scale_numbers(scale: torch.Tensor) -> torch.Tensor:
    if scale.dtype == torch.float32:
        return scale
    return e4m3_numbers(scale) if scale.dtype == torch.float8_e4m3fn else e8m0.numbers(scale)


def e4m3_numbers(codes: torch.Tensor) -> torch.Tensor:
    """float32 of e4m3fn codes, NaN included: by a table, since torch's cast takes ten times as long on a CPU."""
    table = torch.arange(256, dtype=torch.uint8, device=codes.device).view(torch.float8_e4m3fn).float()
    return table.index_select(0, codes.view(torch.uint8).reshape(-1).int()).view(codes.shape)


def multiply_blocks(wide: torch.Tensor, scale: torch.Tensor, *, block: int) -> torch.Tensor:
    """wide [..., W] multiplied in place by scale [..., ceil(W / block)], each for a block of columns; leading dims of
    scale may be 1 for all of wide's."""
    whole = wide.shape[-1] // block
    _blocks(wide[..., : whole * block], block).mul_(scale[..., :whole, None])
    if whole * block < wide.shape[-1]:
        wide[..., whole * block :].mul_(scale[..., whole:])
    return wide

"""What all kernels share: the sizes of their tiles, how codes and scales become numbers, and how sums are stored.

T tokens (rows of x), O outputs, I inputs. A program computes one tile of the result, [tile_tokens, tile_outputs], by
itself: it goes through all inputs in order, `tile_inputs` at a time, so the bits are the same in every run. Where a row
of such a tile has one scale, its codes are multiplied exactly and the float32 sums of the tile are scaled; where it has
several, each number is the product with its scale, in float32, rounded to x's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import torch

from quant.triton.language import device_function, tl

LEAST = 16  # of each size: what the tensor cores take
WHOLE_ROW = 0  # as a number of columns: all of them


@dataclass(frozen=True)
class Tiles:
    """Sizes of a program's tiles, the scales of a row of a weight's tile, warps, and tiles on their way at a time."""

    tokens: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    scales: int = 1

    def grid(self, tokens: int, outputs: int) -> tuple[int, int]:
        """Programs for a result [tokens, outputs]: those that share a weight's tile are neighbours."""
        return -(-tokens // self.tokens), -(-outputs // self.outputs)

    def constants(self) -> dict[str, int]:
        """The sizes as a kernel's constants."""
        return {
            "tile_tokens": self.tokens,
            "tile_outputs": self.outputs,
            "tile_inputs": self.inputs,
            "tile_scales": self.scales,
        }


def tiles_for(tokens: int, *, bits: int, columns_per_scale: int) -> Tiles:
    """Tiles for codes of so many bits with a scale for each `columns_per_scale` (a multiple of 16, or WHOLE_ROW).

    Few tokens wait for memory: narrow tiles, for more programs, and 128 bytes of a weight's row at a time. A number of
    columns that is no power of two gets tiles of its largest factor that is one. The sizes are estimates within what
    registers and shared memory hold; examples/gpu_check.py times them.
    """
    if tokens <= 16:
        found = Tiles(16, 32, 1024 // bits, warps=4, stages=4)
    elif tokens <= 64:
        found = Tiles(32 if tokens <= 32 else 64, 64, 512 // bits, warps=4, stages=4)
    else:
        found = Tiles(128, 128, 64, warps=8, stages=3)
    if columns_per_scale == WHOLE_ROW or columns_per_scale % found.inputs == 0:
        return found
    factor = columns_per_scale & -columns_per_scale
    assert factor >= LEAST, f"{columns_per_scale} columns to a scale"
    if factor == columns_per_scale:
        return replace(found, scales=found.inputs // factor)
    return replace(found, inputs=min(found.inputs, factor))


class ScaleForm(IntEnum):
    """How a scale is stored. Kernels compare with the numbers."""

    FLOAT = 0  # any floating-point type of the language
    E8M0 = 1  # uint8: 2^(code - 127), 255 is NaN (OCP Microscaling Formats 1.0)
    E4M3 = 2  # uint8: the bits of float8_e4m3fn


def scale_form(scale: torch.Tensor) -> tuple[torch.Tensor, ScaleForm]:
    """A scale as a kernel reads it."""
    if scale.dtype == torch.float8_e8m0fnu:
        return scale.view(torch.uint8), ScaleForm.E8M0
    if scale.dtype == torch.float8_e4m3fn:
        return scale.view(torch.uint8), ScaleForm.E4M3
    return scale, ScaleForm.FLOAT


@device_function
def e4m3_numbers(codes: tl.tensor) -> tl.tensor:
    """float16 numbers of uint8 codes: the bits, moved into a float16, stand for the number over 2^8. Exact."""
    magnitude = (codes & 0x7F).to(tl.uint16)
    bits = ((codes & 0x80).to(tl.uint16) << 8) | (magnitude << 7)
    numbers = bits.to(tl.float16, bitcast=True) * 256.0
    return tl.where(magnitude == 0x7F, float("nan"), numbers)


@device_function
def e2m1_numbers(codes: tl.tensor) -> tl.tensor:
    """float16 numbers of codes 0..15, sign in bit 3: the bits, moved into a float16, stand for the number over 2^14."""
    wide = codes.to(tl.uint16)
    bits = ((wide & 8) << 12) | ((wide & 7) << 9)
    return bits.to(tl.float16, bitcast=True) * 16384.0


@device_function
def e8m0_numbers(codes: tl.tensor) -> tl.tensor:
    """float32 numbers of uint8 codes: the exponent field of a float32, whose least is half of its least normal."""
    wide = codes.to(tl.int32)
    bits = tl.where(wide == 0, 0x00400000, tl.where(wide == 255, 0x7FC00000, wide << 23))
    return bits.to(tl.float32, bitcast=True)


@device_function
def load_scales(at: tl.tensor, within: tl.tensor, form: tl.constexpr) -> tl.tensor:
    """float32 [tile_outputs, tile_scales]."""
    stored = tl.load(at, mask=within, other=0)
    if form == 1:
        return e8m0_numbers(stored)
    elif form == 2:  # noqa: RET505 - a branch that is not taken must not be compiled: the types would differ
        return e4m3_numbers(stored).to(tl.float32)
    else:
        return stored.to(tl.float32)


@device_function
def load_nibbles(at: tl.tensor, within: tl.tensor, outputs: tl.constexpr, inputs: tl.constexpr) -> tl.tensor:
    """uint8 [outputs, inputs] of 0..15 from bytes [outputs, inputs / 2]: the low nibble is the even column."""
    packed = tl.load(at, mask=within, other=0)
    return tl.reshape(tl.join(packed & 15, packed >> 4), (outputs, inputs))


@device_function
def spread(factor: tl.tensor, outputs: tl.constexpr, inputs: tl.constexpr, scales: tl.constexpr) -> tl.tensor:
    """[outputs, scales] as [outputs, inputs]: each for as many columns."""
    wide = tl.broadcast_to(factor[:, :, None], (outputs, scales, inputs // scales))
    return tl.reshape(wide, (outputs, inputs))


@device_function
def add_products(
    sums: tl.tensor, numbers: tl.tensor, codes: tl.tensor, factor: tl.tensor,
    outputs: tl.constexpr, inputs: tl.constexpr, scales: tl.constexpr, product: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """sums [tokens, outputs] plus numbers [tokens, inputs] times the weight, codes [outputs, inputs] by factor."""
    if scales == 1:
        part = tl.dot(numbers.to(product), tl.trans(codes.to(product)), input_precision="ieee")
        return sums + part * tl.trans(factor)
    else:  # noqa: RET505 - as above
        wide = codes.to(tl.float32) * spread(factor, outputs, inputs, scales)
        return tl.dot(numbers.to(product), tl.trans(wide.to(product)), sums, input_precision="ieee")


@device_function
def store_sums(
    sums: tl.tensor, bias: tl.tensor, out: tl.tensor, token: tl.tensor, output: tl.tensor,
    tokens: tl.tensor, outputs: tl.tensor,
) -> None:  # fmt: skip
    """sums plus bias, rounded once to the result's dtype."""
    if bias is not None:
        sums += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    within = (token < tokens)[:, None] & (output < outputs)[None, :]
    tl.store(out + token[:, None] * outputs + output[None, :], sums.to(out.dtype.element_ty), mask=within)

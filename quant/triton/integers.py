"""x times a weight of 4- or 8-bit integers with a scale, and perhaps a zero point, for each group of a row."""

from __future__ import annotations

import torch

from quant.triton.language import kernel, launch, product_dtype, tl
from quant.triton.tiles import WHOLE_ROW, add_products, load_nibbles, load_scales, spread, store_sums, tiles_for


@kernel
def integers_kernel(
    x: tl.tensor, weight: tl.tensor, scale: tl.tensor, zeros: tl.tensor, bias: tl.tensor, out: tl.tensor,
    tokens: tl.tensor, outputs: tl.tensor, inputs: tl.tensor,
    row_nbytes: tl.tensor, groups: tl.tensor, group_size: tl.tensor,
    tile_tokens: tl.constexpr, tile_outputs: tl.constexpr, tile_inputs: tl.constexpr, tile_scales: tl.constexpr,
    product: tl.constexpr, bits: tl.constexpr, middle: tl.constexpr,
) -> None:  # fmt: skip
    """One tile [tile_tokens, tile_outputs]. Without zero points, `middle` is the code of zero."""
    token = tl.program_id(0).to(tl.int64) * tile_tokens + tl.arange(0, tile_tokens)
    output = tl.program_id(1).to(tl.int64) * tile_outputs + tl.arange(0, tile_outputs)
    step, group = tl.arange(0, tile_inputs), tl.arange(0, tile_scales)
    byte = tl.arange(0, tile_inputs * bits // 8)
    x_at = x + token[:, None] * inputs + step[None, :]
    weight_at = weight + output[:, None] * row_nbytes + byte[None, :]
    here, there = (token < tokens)[:, None], (output < outputs)[:, None]
    sums = tl.full((tile_tokens, tile_outputs), 0.0, tl.float32)
    for start in range(0, inputs, tile_inputs):
        numbers = tl.load(x_at + start, mask=here & (step < inputs - start)[None, :], other=0.0)
        first = start * bits // 8
        within = there & (byte < row_nbytes - first)[None, :]
        if bits == 4:
            codes = load_nibbles(weight_at + first, within, tile_outputs, tile_inputs)
        else:
            codes = tl.load(weight_at + first, mask=within, other=0)
        place = (output * groups)[:, None] + start // group_size + group[None, :]
        known = there & (group < groups - start // group_size)[None, :]
        wide = codes.to(tl.float32)  # by way of float32: the interpreter knows no other way to bfloat16
        if zeros is None:
            wide -= middle
        else:
            zero = tl.load(zeros + place, mask=known, other=0).to(tl.float32)
            wide -= spread(zero, tile_outputs, tile_inputs, tile_scales)
        factor = load_scales(scale + place, known, 0)
        sums = add_products(sums, numbers, wide, factor, tile_outputs, tile_inputs, tile_scales, product)
    store_sums(sums, bias, out, token, output, tokens, outputs)


def multiply_integers(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | int,
    bias: torch.Tensor | None,
    *,
    bits: int,
    group_size: int,
) -> torch.Tensor:
    """x [T, I] -> [T, O] in x's dtype; all contiguous. The number is (code - zero) * scale.

    weight [O, ceil(I / 2)] of uint8 for 4 bits (the low nibble is the even column), [O, I] of uint8 or int8 for 8;
    scale [O, groups], any float; zero uint8 [O, groups], or one code for all. group_size is a multiple of 16,
    or 0 for one group a row. Differences of codes are exact in bfloat16: at most 8 bits and a sign.
    """
    tokens, inputs, outputs = x.shape[0], x.shape[1], weight.shape[0]
    group_size = 0 if group_size >= inputs else group_size
    tiles = tiles_for(tokens, bits=bits, columns_per_scale=group_size or WHOLE_ROW)
    groups = -(-inputs // group_size) if group_size else 1
    out = x.new_empty(tokens, outputs)
    zeros, middle = (None, zero) if isinstance(zero, int) else (zero, 0)
    launch(
        integers_kernel, tiles.grid(tokens, outputs),
        x, weight, scale, zeros, bias, out, tokens, outputs, inputs, weight.shape[1], groups, group_size or inputs,
        device=x.device, warps=tiles.warps, stages=tiles.stages,
        constants={**tiles.constants(), "product": product_dtype(x.dtype), "bits": bits, "middle": middle},
    )  # fmt: skip
    return out

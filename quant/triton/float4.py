"""x times an e2m1 weight: MXFP4 (an E8M0 scale for 32 numbers), NVFP4 (an E4M3 scale for 16, and one for the row)."""

from __future__ import annotations

import torch

from quant.triton.language import kernel, launch, product_dtype, tl
from quant.triton.tiles import add_products, e2m1_numbers, load_nibbles, load_scales, scale_form, store_sums, tiles_for


@kernel
def float4_kernel(
    x: tl.tensor, weight: tl.tensor, scale: tl.tensor, row_scale: tl.tensor, bias: tl.tensor, out: tl.tensor,
    tokens: tl.tensor, outputs: tl.tensor, inputs: tl.tensor,
    row_nbytes: tl.tensor, blocks: tl.tensor, row_scale_step: tl.tensor, block: tl.constexpr,
    tile_tokens: tl.constexpr, tile_outputs: tl.constexpr, tile_inputs: tl.constexpr, tile_scales: tl.constexpr,
    product: tl.constexpr, form: tl.constexpr,
) -> None:  # fmt: skip
    """One tile [tile_tokens, tile_outputs] of x [T, I] times the weight [O, I] transposed."""
    token = tl.program_id(0).to(tl.int64) * tile_tokens + tl.arange(0, tile_tokens)
    output = tl.program_id(1).to(tl.int64) * tile_outputs + tl.arange(0, tile_outputs)
    step, place = tl.arange(0, tile_inputs), tl.arange(0, tile_scales)
    byte = tl.arange(0, tile_inputs // 2)
    x_at = x + token[:, None] * inputs + step[None, :]
    weight_at = weight + output[:, None] * row_nbytes + byte[None, :]
    scale_at = scale + (output * blocks)[:, None] + place[None, :]
    here, there = (token < tokens)[:, None], (output < outputs)[:, None]
    sums = tl.full((tile_tokens, tile_outputs), 0.0, tl.float32)
    for start in range(0, inputs, tile_inputs):
        numbers = tl.load(x_at + start, mask=here & (step < inputs - start)[None, :], other=0.0)
        first = start // 2
        within = there & (byte < row_nbytes - first)[None, :]
        wide = e2m1_numbers(load_nibbles(weight_at + first, within, tile_outputs, tile_inputs))
        factor = load_scales(scale_at + start // block, there & (place < blocks - start // block)[None, :], form)
        sums = add_products(sums, numbers, wide, factor, tile_outputs, tile_inputs, tile_scales, product)
    if row_scale is not None:
        sums *= tl.load(row_scale + output * row_scale_step, mask=output < outputs, other=0.0)[None, :]
    store_sums(sums, bias, out, token, output, tokens, outputs)


def multiply_float4(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    block: int,
) -> torch.Tensor:
    """x [T, I], weight uint8 [O, ceil(I / 2)] -> [T, O] in x's dtype; all contiguous.

    The low nibble is the even column. scale float8_e8m0fnu or float8_e4m3fn [O, ceil(I / block)], block 16 or more,
    a power of two; row_scale float32 [O] (perhaps one number expanded), where it is given.
    """
    scale, form = scale_form(scale)
    tokens, inputs, outputs = x.shape[0], x.shape[1], weight.shape[0]
    tiles = tiles_for(tokens, bits=4, columns_per_scale=block)
    out = x.new_empty(tokens, outputs)
    launch(
        float4_kernel, tiles.grid(tokens, outputs),
        x, weight, scale, row_scale, bias, out, tokens, outputs, inputs,
        weight.shape[1], -(-inputs // block), 0 if row_scale is None else row_scale.stride(0), block,
        device=x.device, warps=tiles.warps, stages=tiles.stages,
        constants={**tiles.constants(), "product": product_dtype(x.dtype), "form": int(form)},
    )  # fmt: skip
    return out

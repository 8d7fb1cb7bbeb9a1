"""x times an e4m3 weight with scales for any blocks of it: 128 x 128, one row, one tensor, or 32 numbers (MXFP8)."""

from __future__ import annotations

import torch

from quant.triton.language import kernel, launch, product_dtype, tl
from quant.triton.tiles import WHOLE_ROW, add_products, e4m3_numbers, load_scales, scale_form, store_sums, tiles_for


@kernel
def float8_kernel(
    x: tl.tensor, weight: tl.tensor, scale: tl.tensor, bias: tl.tensor, out: tl.tensor,
    tokens: tl.tensor, outputs: tl.tensor, inputs: tl.tensor,
    scale_columns: tl.tensor, rows_per_scale: tl.tensor, columns_per_scale: tl.tensor,
    tile_tokens: tl.constexpr, tile_outputs: tl.constexpr, tile_inputs: tl.constexpr, tile_scales: tl.constexpr,
    product: tl.constexpr, form: tl.constexpr, native: tl.constexpr,
) -> None:  # fmt: skip
    """One tile [tile_tokens, tile_outputs] of x [T, I] times weight [O, I] transposed."""
    token = tl.program_id(0).to(tl.int64) * tile_tokens + tl.arange(0, tile_tokens)
    output = tl.program_id(1).to(tl.int64) * tile_outputs + tl.arange(0, tile_outputs)
    step, block = tl.arange(0, tile_inputs), tl.arange(0, tile_scales)
    x_at = x + token[:, None] * inputs + step[None, :]
    weight_at = weight + output[:, None] * inputs + step[None, :]
    scale_at = scale + ((output // rows_per_scale) * scale_columns)[:, None] + block[None, :]
    here, there = (token < tokens)[:, None], (output < outputs)[:, None]
    sums = tl.full((tile_tokens, tile_outputs), 0.0, tl.float32)
    for start in range(0, inputs, tile_inputs):
        within = (step < inputs - start)[None, :]
        numbers = tl.load(x_at + start, mask=here & within, other=0.0)
        codes = tl.load(weight_at + start, mask=there & within, other=0.0 if native else 0)
        wide = codes.to(tl.float16) if native else e4m3_numbers(codes)
        first = start // columns_per_scale
        factor = load_scales(scale_at + first, there & (block < scale_columns - first)[None, :], form)
        sums = add_products(sums, numbers, wide, factor, tile_outputs, tile_inputs, tile_scales, product)
    store_sums(sums, bias, out, token, output, tokens, outputs)


def multiply_float8(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    rows_per_scale: int,
    columns_per_scale: int,
    native: bool,
) -> torch.Tensor:
    """x [T, I], weight float8_e4m3fn [O, I] -> [T, O] in x's dtype; all contiguous.

    scale float32 or float8_e8m0fnu [ceil(O / rows_per_scale), ceil(I / columns_per_scale)]; columns_per_scale is a
    multiple of 16, or at least I. native: the device converts float8 by instructions (from capability 8.9 on);
    otherwise by operations on integers. The numbers are the same.
    """
    scale, form = scale_form(scale)
    tokens, (outputs, inputs) = x.shape[0], weight.shape
    whole = columns_per_scale >= inputs
    tiles = tiles_for(tokens, bits=8, columns_per_scale=WHOLE_ROW if whole else columns_per_scale)
    out = x.new_empty(tokens, outputs)
    launch(
        float8_kernel, tiles.grid(tokens, outputs),
        x, weight if native else weight.view(torch.uint8), scale, bias, out,
        tokens, outputs, inputs, -(-inputs // columns_per_scale), rows_per_scale, min(inputs, columns_per_scale),
        device=x.device, warps=tiles.warps, stages=tiles.stages,
        constants={**tiles.constants(), "product": product_dtype(x.dtype), "form": int(form), "native": native},
    )  # fmt: skip
    return out

"""Products of 8-bit activations with e4m3 weights by torch._scaled_mm: each token is rounded under a scale of its own.

A token's scale is its largest magnitude / 448, so its numbers depend on no other token of the batch. Every row of the
weight has a scale of its own too; those of a fused weight with one scale a part are repeated for the rows of each, so
no joint scale is needed, and nothing is quantized twice. The weight's column-major form that the operator wants is the
transpose of what is stored: a view. A weight in e4m3fnuz meets activations in e4m3fnuz, which ends at 240.

T tokens, I inputs, O outputs. rows [T, I]; weight float8_e4m3fn [O, I]; scale float32 [O]; results [T, O].
"""

from __future__ import annotations

import torch

from quant.row_codec import scale_of


def quantize_tokens(
    rows: torch.Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of an 8-bit float `dtype` [T, I] and float32 scales [T, 1]; a token of zeros has scale 1."""
    wide, largest = rows.float(), torch.finfo(dtype).max
    scale = scale_of(wide.abs().amax(1, keepdim=True), largest=largest)
    return (wide / scale).clamp_(-largest, largest).to(dtype), scale


def scaled_rows(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The operator applies both scales to its float32 sums; the bias is added to its (rounded) result."""
    codes, token_scale = quantize_tokens(rows, dtype=weight.dtype)
    out = torch._scaled_mm(
        codes, weight.t(), scale_a=token_scale, scale_b=scale.contiguous().unsqueeze(0), out_dtype=rows.dtype
    )
    return out if bias is None else out.add_(bias)


def scaled_sums(
    rows: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Where the operator takes one scale for all: it gets ones, and scales and bias are applied to float32 sums."""
    codes, token_scale = quantize_tokens(rows, dtype=weight.dtype)
    one = torch.ones((), dtype=torch.float32, device=rows.device)
    sums = torch._scaled_mm(codes, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    sums.mul_(token_scale).mul_(scale)
    return (sums if bias is None else sums.add_(bias)).to(rows.dtype)

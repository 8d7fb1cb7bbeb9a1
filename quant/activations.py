"""Activations in 8 bits: each token is rounded to int8 under a scale of its own before it is multiplied.

The products of 4-bit and 8-bit weights with 8-bit activations (W4A8, W8A8), with the scale made as the token comes
("dynamic"). The codes are multiplied in float32, which holds them exactly, so the numbers are those of an integer
product but for the rounding of its sums; where there is an integer kernel is a matter of speed, and not of this.

T tokens, I input features, O output rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from quant.int8_codec import LARGEST
from quant.row_codec import scale_of


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, I] -> whole numbers from -127 to 127 in float32 [T, I], and their scales float32 [T, 1].

    scale = the token's largest magnitude / 127, 1 for a token of zeros; codes are rounded half to even. A NaN or an
    infinity makes the scale, and so the whole token, NaN or infinite.
    """
    wide = x.float()
    scale = scale_of(wide.abs().amax(-1, keepdim=True), largest=LARGEST)
    return (wide / scale).round_().clamp_(-LARGEST, LARGEST), scale


def int8_product(
    x: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    """x [T, I] in 8 bits through `product`, which multiplies float32 [T, I] by the weight: [T, O] in x's dtype.

    Scale and bias are applied to float32 sums, which are rounded once.
    """
    codes, scale = quantize_tokens(x)
    sums = product(codes) * scale
    return (sums if bias is None else sums + bias.float()).to(x.dtype)

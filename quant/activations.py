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

Maximum = Callable[[torch.Tensor], torch.Tensor]
"""float32 [T, 1] of one rank -> the elementwise maximum of all ranks that have some of the tokens' features."""


def own(x: torch.Tensor) -> torch.Tensor:
    """The maximum where the tokens are whole."""
    return x


def quantize_tokens(x: torch.Tensor, *, maximum: Maximum = own) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, I] -> whole numbers from -127 to 127 in float32 [T, I], and their scales float32 [T, 1].

    scale = the token's largest magnitude / 127, 1 for a token of zeros; codes are rounded half to even. A NaN or an
    infinity makes the scale, and so the whole token, NaN or infinite. `maximum`: where I are some of a token's
    features, it agrees with who has the others: the codes are then those of the whole token.
    """
    wide = x.float()
    scale = scale_of(maximum(wide.abs().amax(-1, keepdim=True)), largest=LARGEST)
    return (wide / scale).round_().clamp_(-LARGEST, LARGEST), scale


def int8_product(
    x: torch.Tensor,
    product: Callable[[torch.Tensor], torch.Tensor],
    bias: torch.Tensor | None,
    *,
    maximum: Maximum = own,
) -> torch.Tensor:
    """x [T, I] in 8 bits through `product`, which multiplies float32 [T, I] by the weight: [T, O] in x's dtype.

    Scale and bias are applied to float32 sums, which are rounded once. `maximum` is quantize_tokens'.
    """
    codes, scale = quantize_tokens(x, maximum=maximum)
    sums = product(codes) * scale
    return (sums if bias is None else sums + bias.float()).to(x.dtype)

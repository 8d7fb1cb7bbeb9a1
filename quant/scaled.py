"""torch._scaled_mm on float8 weights: activations are quantized row by row too. Opt-in, on devices that have it.

T rows of activations, O out_features, I in_features. x [T, I], codes [O, I].
"""

from __future__ import annotations

import torch

from quant.decoder import Decoder, Stored

_ROWWISE_FROM = (9, 0)  # CUDA capability with scales per row and per column
_MULTIPLE = 16  # of I and O, asked for by the operator
_FLOAT8_MAX = 448.0


def takes_scaled_product(decoder: Decoder, dtype: torch.dtype, capability: tuple[int, int] | None) -> bool:
    """Whether `scaled_product` can run: float8 codes with a scale per row, on a device that multiplies them."""
    if capability is None or capability < _ROWWISE_FROM or dtype != torch.bfloat16:
        return False
    rows, columns = decoder.raw.shape
    return decoder.stored is Stored.FLOAT8 and rows % _MULTIPLE == 0 and columns % _MULTIPLE == 0


def scaled_product(x: torch.Tensor, decoder: Decoder, bias: torch.Tensor | None) -> torch.Tensor:
    """x bfloat16, each row quantized to float8 by its largest number, times the codes, both scales, plus bias."""
    scale = x.abs().amax(dim=1, keepdim=True).float().div_(_FLOAT8_MAX)
    divisor = torch.where(scale == 0, 1.0, scale)
    codes = x.float().div_(divisor).clamp_(-_FLOAT8_MAX, _FLOAT8_MAX).to(torch.float8_e4m3fn)
    assert decoder.code_scale is not None
    weight_scale = decoder.code_scale.view(1, -1)
    out = torch._scaled_mm(codes, decoder.raw.t(), scale_a=scale, scale_b=weight_scale, out_dtype=x.dtype)
    return out if bias is None else out.add_(bias)

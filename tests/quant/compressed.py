"""Weights in the compressed-tensors layout, made number by number as its documentation states it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]
Encoded = tuple[Tensors, torch.Tensor]
Encode = Callable[[str, torch.Tensor], Encoded]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned codes [rows, count] as I32 [rows, ceil(count bits / 32)]: code i takes the bits from i x bits on."""
    nbytes = 4 * -(-codes.shape[1] * bits // 32)
    rows = [sum(int(code) << (i * bits) for i, code in enumerate(row)) for row in codes.tolist()]
    return torch.from_numpy(np.frombuffer(b"".join(n.to_bytes(nbytes, "little") for n in rows), "<i4").copy()).view(
        len(rows), nbytes // 4
    )


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 [rows, even count] as U8 [rows, count / 2], the even column low."""
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def integers(
    weight: torch.Tensor,
    *,
    bits: int,
    size: int,
    symmetric: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    as_words: bool = True,
) -> Encoded:
    """In groups of `size` columns (0: the row): with scales, zero points of any value, and what they stand for."""
    rows, columns = weight.shape
    group = torch.arange(columns) // (size or columns)
    scale = (
        weight.float().abs().amax(1, keepdim=True) / 2 ** (bits - 1) * (1 + torch.rand(rows, int(group[-1]) + 1))
    ).to(dtype)
    zero = torch.full(scale.shape, 2 ** (bits - 1)) if symmetric else torch.randint(0, 2**bits, scale.shape)
    codes = (weight.float() / scale.float()[:, group]).round().add(zero[:, group]).clamp(0, 2**bits - 1).long()
    wide = (codes - zero[:, group]).float() * scale.float()[:, group]
    signed = 2 ** (bits - 1)
    tensors = {"weight_scale": scale}
    if as_words:
        tensors |= {"weight_packed": packed(codes, bits), "weight_shape": torch.tensor([rows, columns])}
    else:
        tensors |= {"weight": (codes - signed).to(torch.int8)}
    if not symmetric:
        tensors["weight_zero_point"] = packed(zero.t(), bits).t() if as_words else (zero - signed).to(torch.int8)
    return tensors, wide


def float8(weight: torch.Tensor, scale: torch.Tensor, by_number: torch.Tensor) -> Encoded:
    """e4m3 codes under scales of any kind, given once more for each number."""
    codes = (weight.float() / by_number.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * by_number.float()


def float4(weight: torch.Tensor, *, block: int, divisor: float | None = None) -> Encoded:
    """Random E2M1 codes under E8M0 scales, or under e4m3 scales that a global one divides."""
    rows, columns = weight.shape
    codes = torch.randint(0, 16, (rows, columns))
    numbers = E2M1[codes].unflatten(1, (-1, block))
    if divisor is None:
        scale = torch.randint(120, 124, (rows, columns // block)).to(torch.uint8)
        wide = numbers * torch.exp2(scale.float() - 127).unsqueeze(2)
        return {"weight_packed": nibbles(codes), "weight_scale": scale}, wide.flatten(1)
    scale = (torch.rand(rows, columns // block) * 400 + 8).to(torch.float8_e4m3fn)
    wide = numbers.double() * scale.double().unsqueeze(2) / divisor
    tensors = {"weight_packed": nibbles(codes), "weight_scale": scale, "weight_global_scale": torch.tensor([divisor])}
    return tensors, wide.flatten(1).float()


def args(bits: int, kind: str, strategy: str, **more: object) -> dict[str, Any]:
    """QuantizationArgs of weights."""
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **more}


def config(weights: Mapping[str, Any], *, targets: list[str] | None = None, **more: object) -> dict[str, Any]:
    """A quantization_config of one group."""
    group = {"targets": targets or ["Linear"], "weights": dict(weights), "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": group}, **more,
    }  # fmt: skip

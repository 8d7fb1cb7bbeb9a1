"""Norms by torch's own operator, and of queries and keys together: the bits of the formula, step by step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from layers.model_config import NormKind
from layers.norm import LayerNormPerHead, RMSNorm, norm_heads, unweighted
from layers.weights import ParamKind, ParamSpec, Section
from quant.dtypes import DType
from quant.wide import Wide

EPS = 1e-6
DTYPES = {torch.float32: DType.F32, torch.bfloat16: DType.BF16, torch.float16: DType.F16}


def weight_of(dtype: torch.dtype, *shape: int) -> ParamSpec:
    return ParamSpec("norm.weight", shape, (Section("", shape[0]),), ParamKind.NORM, DTYPES[dtype], Wide())


def filled(norm: nn.Module, dtype: torch.dtype, *shape: int) -> nn.Module:
    norm.register_parameter("weight", nn.Parameter(torch.randn(shape).to(dtype), requires_grad=False))
    return norm


def rms(kind: NormKind, dtype: torch.dtype, width: int, *, eps: float = EPS) -> nn.Module:
    return filled(RMSNorm(weight_of(dtype, width), eps=eps, kind=kind), dtype, width)


def by_steps(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2560), (3, 1000), (1, 40, 128), (7, 5, 20), (257, 64), (2, 7168)])
def test_the_operator_takes_the_same_steps(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for scale in (0.001, 1.0, 60.0):
        x = (torch.randn(shape) * scale).to(dtype)
        assert torch.equal(unweighted(x, eps=EPS), by_steps(x).to(dtype))
        part = x[..., : shape[-1] // 2]  # not in one run
        assert torch.equal(unweighted(part, eps=EPS), by_steps(part).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [NormKind.RMS, NormKind.RMS_FLOAT32, NormKind.RMS_PLUS_ONE])
def test_each_kind_rounds_where_it_says(kind: NormKind, dtype: torch.dtype) -> None:
    norm, x = rms(kind, dtype, 96), (torch.randn(5, 96) * 3).to(dtype)
    weight, normed = norm.get_parameter("weight"), by_steps(x)
    wanted = {
        NormKind.RMS: weight * normed.to(dtype),
        NormKind.RMS_FLOAT32: (weight * normed).to(dtype),
        NormKind.RMS_PLUS_ONE: (normed * (1.0 + weight.float())).to(dtype),
    }[kind]
    assert torch.equal(norm(x), wanted)
    assert torch.equal(norm(x, x.float().pow(2).mean(-1, keepdim=True)), wanted)  # as several ranks share it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", ["rms", "plus one", "other eps", "per head"])
def test_heads_together_have_the_bits_of_each_part_by_itself(first: str, dtype: torch.dtype) -> None:
    norms = {
        "rms": rms(NormKind.RMS, dtype, 24),
        "plus one": rms(NormKind.RMS_PLUS_ONE, dtype, 24),
        "other eps": rms(NormKind.RMS, dtype, 24, eps=0.1),
        "per head": filled(LayerNormPerHead(weight_of(dtype, 6, 24), eps=EPS), dtype, 6, 24),
    }
    rest = rms(NormKind.RMS, dtype, 24)
    product = torch.randn(4, 10 * 24).to(dtype)
    heads = product[:, : 8 * 24].unflatten(-1, (8, 24))  # beside others, as attention has them
    before = product.clone()
    found = norm_heads(heads, 6, norms[first], rest)
    assert torch.equal(found, torch.cat((norms[first](heads[:, :6]), rest(heads[:, 6:])), dim=1))
    assert torch.equal(product, before)

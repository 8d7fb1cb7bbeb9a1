"""Activations in 8 bits, token by token: codes, scales, and what a linear layer makes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layers.context import StepContext
from layers.linear import RowParallelLinear
from layers.weights import ParamKind, ParamSpec, Section
from quant.activations import int8_product, quantize_tokens
from quant.dtypes import DType
from quant.int8 import Int8PerChannel
from quant.kernels import Kernels
from quant.registry import scheme_by_name
from quant.scheme import Scheme


def linear_of(weight: torch.Tensor, scheme: Scheme, bias: torch.Tensor | None = None) -> RowParallelLinear:
    sections = (Section("", weight.shape[0]),)
    spec = ParamSpec("m.weight", tuple(weight.shape), sections, ParamKind.LINEAR, DType.F32, scheme)
    if bias is None:
        module = RowParallelLinear(spec)
    else:
        rows = ParamSpec("m.bias", tuple(bias.shape), sections, ParamKind.BIAS, DType.F32, scheme_by_name("none"))
        module = RowParallelLinear(spec, rows)
        module.register_parameter("bias", torch.nn.Parameter(bias, requires_grad=False))
    stored = {name: torch.empty_like(meta, device="cpu") for name, meta in module.stored().items()}
    scheme.quantize_into(weight, stored)
    for name, tensor in stored.items():
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return module


def test_codes_by_hand() -> None:
    codes, scale = quantize_tokens(
        torch.tensor([[127.0, -64.0, 0.5, 1.5], [0.0, 0.0, 0.0, 0.0], [-2.54, 0.0, 1.27, 0.6]])
    )
    assert codes.tolist() == [[127, -64, 0, 2], [0, 0, 0, 0], [-127, 0, 64, 30]]  # halves go to the even number
    assert scale.flatten().tolist() == pytest.approx([1.0, 1.0, 0.02])


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_multiplies_whole_numbers_exactly(rows: int, dtype: torch.dtype) -> None:
    """Weights and activations whose scales are powers of two: every sum is exact, so the result is to the bit."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randint(-127, 128, (24, 48), generator=generator).float()
    x = torch.randint(-127, 128, (rows, 48), generator=generator).float()
    weight[:, 0], x[:, 0] = 127, -127
    bias = torch.randint(-9, 9, (24,), generator=generator).float()
    module = linear_of(weight / 64, Int8PerChannel(), bias)
    found = module((x / 8).to(dtype), StepContext(Kernels.detect(), int8_activations=True))
    wanted = x.double() @ weight.double().T / 512 + bias.double()
    assert torch.equal(found, wanted.float().to(dtype))


@pytest.mark.parametrize("scheme", ["none", "int8_per_channel", "int4_per_group"])
def test_a_linear_layer_is_its_literal_simulation(scheme: str) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(40, 96, generator=generator), torch.randn(5, 96, generator=generator)
    kept = scheme_by_name(scheme)
    module = linear_of(weight, kept)
    found = module(x, StepContext(Kernels.detect(), int8_activations=True))
    numbers = kept.dequantize(module.stored(), (40,), dtype=torch.float32).double().numpy()
    wanted = np.empty((5, 40))
    for row, token in enumerate(x.double().numpy()):
        step = np.abs(token).max() / 127
        wanted[row] = numbers @ (np.rint(token / step) * step)
    np.testing.assert_allclose(found.double().numpy(), wanted, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found, module(x, StepContext(Kernels.detect())))


def test_parts_of_tokens_under_an_agreed_maximum_have_the_codes_of_the_whole() -> None:
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(2))
    whole, scale = quantize_tokens(x)
    agreed = x.abs().amax(-1, keepdim=True)
    for columns in (slice(0, 40), slice(40, 96)):
        codes, found = quantize_tokens(x[:, columns], maximum=lambda own: torch.maximum(own, agreed))
        assert torch.equal(codes, whole[:, columns])
        assert torch.equal(found, scale)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_in_its_token_alone(bad: float) -> None:
    x = torch.ones(2, 4)
    x[1, 2] = bad
    out = int8_product(x, lambda codes: codes @ torch.eye(4), None)
    assert torch.equal(out[0], torch.ones(4))
    assert not torch.isfinite(out[1]).any()

"""Products of e4m3 activations: torch's operator, on the CPU, against the same rounding written out."""

from __future__ import annotations

import pytest
import torch

from quant.scaled_products import quantize_tokens, scaled_rows, scaled_sums


def _operands(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 64, generator=generator).to(dtype)
    weight = torch.randn(48, 64, generator=generator).mul_(100).to(torch.float8_e4m3fn)
    return x, weight, torch.rand(48, generator=generator) / 100


def test_a_token_is_rounded_under_its_own_scale() -> None:
    codes, scale = quantize_tokens(torch.tensor([[448.0, -1.0], [0.0, 0.0], [-0.5, 0.25]]))
    assert scale.tolist() == [[1.0], [1.0], [pytest.approx(0.5 / 448)]]
    assert codes.float().tolist() == [[448.0, -1.0], [0.0, 0.0], [-448.0, 224.0]]


@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("product", "dtype"),
    [(scaled_rows, torch.bfloat16), (scaled_sums, torch.bfloat16), (scaled_sums, torch.float16)],
)
def test_products_are_those_of_the_rounded_tokens(
    product: object, dtype: torch.dtype, tokens: int, biased: bool
) -> None:
    x, weight, scale = _operands(tokens, dtype)
    bias = torch.linspace(-1, 1, 48).to(dtype) if biased else None
    token_scale = x.double().abs().amax(1, keepdim=True) / 448
    rounded = (x.double() / token_scale).float().to(torch.float8_e4m3fn).double() * token_scale
    expected = rounded @ (weight.double() * scale.double().unsqueeze(1)).t() + (0 if bias is None else bias.double())
    assert callable(product)
    found = product(x, weight, scale, bias)
    assert found.dtype == dtype
    unit = torch.finfo(dtype).eps
    assert bool(((found.double() - expected).abs() <= unit * (expected.abs() + 1)).all())


def test_one_scale_expanded_to_all_rows_is_taken() -> None:
    x, weight, _ = _operands(3, torch.bfloat16)
    expected = scaled_rows(x, weight, torch.full((48,), 0.25), None)
    assert torch.equal(scaled_rows(x, weight, torch.tensor([0.25]).expand(48), None), expected)

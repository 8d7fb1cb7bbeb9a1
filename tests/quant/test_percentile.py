"""Scales from a percentile of magnitudes, against numbers sorted one by one in Python."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction

import pytest
import torch

from quant.dtypes import DType, to_torch
from quant.errors import QuantError
from quant.float8 import Fp8PerBlock, Fp8PerChannel, Fp8PerTensor
from quant.int8 import Int8PerChannel
from quant.percentile import nearest_rank, takes_percentile, with_percentile
from quant.registry import scheme_by_name, scheme_names
from quant.scheme import Scheme

NAMES = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int8_per_channel")
LARGEST = dict.fromkeys(NAMES, 448.0) | {"int8_per_channel": 127.0}
WIDE = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def quantize(scheme: Scheme, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    specs = scheme.storage((weight.shape[0],), weight.shape[1], wide=DType.F32)
    stored = {key: torch.empty(spec.shape, dtype=to_torch(spec.dtype)) for key, spec in specs.items()}
    scheme.quantize_into(weight, stored)
    return stored


def groups_of(name: str, weight: torch.Tensor) -> list[list[float]]:
    """The magnitudes that share a scale, in the scales' order."""
    sizes = weight.float().abs()
    if name == "fp8_per_tensor":
        return [sizes.flatten().tolist()]
    if name == "fp8_per_block":
        parts = [part for rows in sizes.split(128) for part in rows.split(128, 1)]
        return [part.flatten().tolist() for part in parts]
    return list(sizes.tolist())


def nearest(numbers: list[float], percentile: str) -> float:
    rank = max(1, math.ceil(Fraction(percentile) / 100 * len(numbers)))
    return sorted(numbers)[rank - 1]


@pytest.mark.parametrize(
    ("percentile", "count", "rank"),
    [
        (100, 7, 7),
        (99.9, 1000, 999),
        (99.9, 1001, 1000),
        (50, 4, 2),
        (50, 5, 3),
        (0.001, 10, 1),
        (7, 100, 7),
        (1e-9, 3, 1),
    ],
)
def test_ranks_are_exact(percentile: float, count: int, rank: int) -> None:
    assert nearest_rank(percentile, count=count) == rank


@pytest.mark.parametrize("percentile", [100, 99.9, 90.0, 50, 3, 0.01])
@pytest.mark.parametrize("name", NAMES)
def test_the_scale_is_the_magnitude_of_that_rank(name: str, percentile: float) -> None:
    weight = torch.randn(150, 261, generator=torch.Generator().manual_seed(3)).bfloat16()
    stored = quantize(with_percentile(scheme_by_name(name), percentile), weight)
    expected = torch.tensor([nearest(group, str(percentile)) for group in groups_of(name, weight)])
    assert torch.equal(stored["weight_scale"].flatten(), expected / LARGEST[name])


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", NAMES)
def test_every_wide_dtype_has_its_percentile(name: str, dtype: torch.dtype) -> None:
    weight = torch.randn(130, 140, generator=torch.Generator().manual_seed(4)).mul_(0.03).to(dtype)
    stored = quantize(with_percentile(scheme_by_name(name), 98.5), weight)
    expected = torch.tensor([nearest(group, "98.5") for group in groups_of(name, weight)])
    assert torch.equal(stored["weight_scale"].flatten(), expected / LARGEST[name])


@pytest.mark.parametrize("name", NAMES)
def test_what_lies_beyond_saturates(name: str) -> None:
    weight = torch.ones(1, 100)
    weight[0, 7], weight[0, 9] = 1000.0, -1000.0
    scheme = with_percentile(scheme_by_name(name), 98)
    stored = quantize(scheme, weight)
    wide = scheme.dequantize(stored, (1,), dtype=torch.float32)
    assert stored["weight_scale"].flatten().tolist() == [float(torch.tensor(1.0) / LARGEST[name])]
    codes = stored["weight"].float()[0]
    assert (codes[7].item(), codes[9].item()) == (LARGEST[name], -LARGEST[name])
    assert torch.allclose(wide, weight.clamp(-1, 1))


@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_is_the_largest_magnitude(name: str) -> None:
    weight = torch.randn(140, 200, generator=torch.Generator().manual_seed(5)).bfloat16()
    whole = quantize(scheme_by_name(name), weight)
    for key, tensor in quantize(with_percentile(scheme_by_name(name), 100), weight).items():
        assert torch.equal(tensor.view(torch.uint8), whole[key].view(torch.uint8))


@pytest.mark.parametrize("fault", [math.nan, math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_no_percentile_hides_a_number_that_is_none(name: str, fault: float) -> None:
    weight = torch.ones(2, 200)
    weight[1, 3] = fault
    scheme = with_percentile(scheme_by_name(name), 50)
    assert not scheme.dequantize(quantize(scheme, weight), (2,), dtype=torch.float32)[1, 3].isfinite()


@pytest.mark.parametrize("name", NAMES)
def test_where_the_percentile_is_zero_the_largest_counts(name: str) -> None:
    weight = torch.zeros(1, 100)
    weight[0, 5] = 0.5
    scheme = with_percentile(scheme_by_name(name), 50)
    assert scheme.dequantize(quantize(scheme, weight), (1,), dtype=torch.float32)[0, 5].item() == pytest.approx(0.5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("units", [1, 15, 190, 300, 600, 5000])
def test_scales_below_the_normal_numbers_give_no_nan(name: str, units: int) -> None:
    weight = torch.full((3, 130), units * 2.0**-149)
    stored = quantize(scheme_by_name(name), weight)
    wide = scheme_by_name(name).dequantize(stored, (3,), dtype=torch.float32)
    assert bool(stored["weight"].float().isfinite().all())
    assert bool(stored["weight"].float().ge(0).all())
    assert bool((wide - weight).abs().le(weight).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_codes_are_the_rounded_quotients(dtype: torch.dtype) -> None:
    weight = torch.randn(64, 3000, generator=torch.Generator().manual_seed(6)).to(dtype)
    weight[:, :3] = weight.abs().amax(1, keepdim=True) * torch.tensor([1, -1, 0.5], dtype=dtype)
    stored = quantize(Int8PerChannel(), weight)
    literal = (weight.float() / stored["weight_scale"][:, None]).round().clamp(-127, 127).to(torch.int8)
    assert torch.equal(stored["weight"], literal)


@pytest.mark.parametrize("percentile", [0, -1, 100.1, math.nan, math.inf, True, "99"])
@pytest.mark.parametrize("scheme", [Fp8PerTensor, Fp8PerChannel, Fp8PerBlock, Int8PerChannel])
def test_a_percentile_that_is_none_is_refused(scheme: type, percentile: object) -> None:
    with pytest.raises(QuantError, match=r"percentile .*: a number above 0 and at most 100 is needed"):
        scheme(percentile=percentile)


def test_schemes_that_take_none_say_which_do() -> None:
    assert set(NAMES) <= {name for name in scheme_names() if takes_percentile(scheme_by_name(name))}
    with pytest.raises(QuantError, match=r"'none' takes no percentile; those that do: fp8_per_tensor, fp8_per_channel"):
        with_percentile(scheme_by_name("none"), 99.9)
    assert with_percentile(scheme_by_name("none"), None) == scheme_by_name("none")


def test_percentiles_and_their_storage_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from quant.dtypes import DType\n"
        "from quant.percentile import with_percentile\n"
        "from quant.registry import scheme_by_name\n"
        "with_percentile(scheme_by_name('fp8_per_block'), 99.9).storage((3, 4), 5, wide=DType.BF16)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

"""The codes of float8 and int8, against the formats' definitions written out."""

from __future__ import annotations

import bisect
import itertools
import math

import pytest
import torch

from quant.dtypes import DType, to_torch
from quant.float8_codec import EXPANDED, expand
from quant.panels import Workspace
from quant.registry import scheme_by_name, scheme_names

QUANTIZED = [name for name in scheme_names() if name != "none"]
FLOAT8 = [name for name in QUANTIZED if name.startswith("fp8")]


def _value(code: int) -> float:
    """An e4m3fn code's number: OCP 8-bit floating point specification 1.0, section 5.1."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    return -size if sign else size


POSITIVE = [_value(code) for code in range(127)]


def _nearest(number: float) -> float:
    """The e4m3fn number nearest to one within its range, a tie going to the even code."""
    size = abs(number)
    above = min(bisect.bisect_left(POSITIVE, size), 126)
    below = max(above - 1, 0)
    gaps = size - POSITIVE[below], POSITIVE[above] - size
    code = above if gaps[1] < gaps[0] or (gaps[0] == gaps[1] and above % 2 == 0) else below
    return math.copysign(POSITIVE[code], number)


def _quantize(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scheme, sections = scheme_by_name(name), (weight.shape[0],)
    specs = scheme.storage(sections, weight.shape[1], wide=DType.F32)
    stored = {key: torch.empty(spec.shape, dtype=to_torch(spec.dtype)) for key, spec in specs.items()}
    scheme.quantize_into(weight, scheme.section_views(stored, sections, 0))
    return stored


def _dequantize(name: str, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    return scheme_by_name(name).dequantize(stored, (stored["weight"].shape[0],), dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_float8_code_expands_to_its_number(dtype: torch.dtype) -> None:
    numbers = [code for code in range(256) if code & 127 != 127]
    codes = torch.tensor(numbers, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, -1)
    out = torch.empty(codes.shape, dtype=dtype)
    expand(codes, out, Workspace())
    assert (out.float() * EXPANDED).flatten().tolist() == [_value(code) for code in numbers]


def test_every_float8_code_dequantizes_to_its_number() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    wide = _dequantize("fp8_per_channel", {"weight": codes, "weight_scale": torch.ones(2)}).flatten().tolist()
    for code, number in enumerate(wide):
        assert number == _value(code) or (math.isnan(number) and code & 127 == 127), code


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_rounds_to_nearest_even(name: str) -> None:
    halves = [(low + high) / 2 for low, high in itertools.pairwise(POSITIVE)]
    numbers = [*halves, *(-half for half in halves), *(half * 1.001 for half in halves[:-1]), 448.0]
    stored = _quantize(name, torch.tensor([numbers]))
    # Blocks of 128 columns have scales of their own; each is 448 over its largest, in float32.
    scale = stored["weight_scale"].flatten()
    for column, (number, code) in enumerate(zip(numbers, stored["weight"].float()[0].tolist(), strict=True)):
        one = scale[column // 128] if name == "fp8_per_block" else scale[0]
        assert code == _nearest(float(torch.tensor(number) / one)), (column, number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 100), (130, 257), (64, 1536)])
def test_float8_codes_are_torchs_cast_of_the_quotient(dtype: torch.dtype, rows: int, columns: int) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2)).mul_(0.02).to(dtype)
    scale = weight.float().abs().amax(1) / 448
    stored = _quantize("fp8_per_channel", weight)
    assert torch.equal(stored["weight_scale"], scale)
    literal = (weight.float() / scale[:, None]).to(torch.float8_e4m3fn)
    assert torch.equal(stored["weight"].view(torch.uint8), literal.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_are_the_largest_magnitude_over_the_largest_code(dtype: torch.dtype) -> None:
    weight = torch.randn(260, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[7, 3], weight[200, 299] = -9, 8  # the largest of all is negative
    wide = weight.float()
    rows = torch.tensor([float(row.abs().max()) for row in wide])
    blocks = torch.tensor(
        [[float(wide[r : r + 128, c : c + 128].abs().max()) for c in (0, 128, 256)] for r in (0, 128, 256)]
    )
    for name, expected in {
        "fp8_per_tensor": torch.tensor([9.0]) / 448,
        "fp8_per_channel": rows / 448,
        "fp8_per_block": blocks / 448,
        "int8_per_channel": rows / 127,
    }.items():
        assert torch.equal(_quantize(name, weight)["weight_scale"], expected), name


def test_int8_is_symmetric_and_rounds_to_nearest_even() -> None:
    numbers = [127.0, -127.0, 0.5, 1.5, -0.5, -2.5, 2.500001, 126.5, 0.0, -126.49]
    stored = _quantize("int8_per_channel", torch.tensor([numbers]))
    assert stored["weight"].tolist() == [[127, -127, 0, 2, 0, -2, 3, 126, 0, -126]]
    assert stored["weight_scale"].tolist() == [1.0]


# On N(0, 1), 1024 x 1024: what the formats can do at the least.
@pytest.mark.parametrize(
    ("name", "least_db"),
    [*((name, 31.4) for name in FLOAT8), ("int8_per_channel", 41.9), ("mxfp8", 30.5), ("mxfp4", 18.7), ("nvfp4", 20.3)],
)
def test_signal_to_noise(name: str, least_db: float) -> None:
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    noise = (_dequantize(name, _quantize(name, weight)) - weight).double()
    assert 10 * math.log10(weight.double().square().sum() / noise.square().sum()) >= least_db


@pytest.mark.parametrize("columns", [1, 100, 128, 129])
@pytest.mark.parametrize("name", QUANTIZED)
def test_zeros_stay_zeros(name: str, columns: int) -> None:
    weight = torch.ones(130, columns)
    weight[3] = 0
    assert not _dequantize(name, _quantize(name, weight))[3, :columns].any()
    nothing = _quantize(name, torch.zeros(130, columns))
    if name != "int4_per_group":  # whose code of zero is 8: tests/quant/test_int4.py
        assert not nothing["weight"].float().any()
    assert bool(nothing["weight_scale"].float().isfinite().all())
    assert not _dequantize(name, nothing)[:, :columns].any()


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_number_that_is_none_spoils_its_own_scale_only(name: str, fault: float) -> None:
    weight = torch.ones(300, 300)
    weight[200, 10] = fault
    stored = _quantize(name, weight)
    assert not _dequantize(name, stored)[200, 10].isfinite()
    if name not in ("fp8_per_tensor", "nvfp4"):
        assert bool(_dequantize(name, stored)[:128].isfinite().all())


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("size", [1e-38, 1e-42, 1e-45, 3e38])
def test_extreme_sizes_stay_finite(name: str, size: float) -> None:
    stored = _quantize(name, torch.full((130, 130), size))
    assert bool(_dequantize(name, stored).isfinite().all())

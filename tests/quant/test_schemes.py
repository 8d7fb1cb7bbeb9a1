"""The contract of schemes: storage says what quantize_into fills; linear is a product with what dequantize returns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from quant.cpu_features import CpuFeatures
from quant.dtypes import DType
from quant.kernels import KernelMode, Kernels
from quant.registry import scheme_by_name, scheme_names
from tests.quant.quantized import quantized

QUANTIZED = [name for name in scheme_names() if name != "none"]
OVER_ALL_ROWS = ("fp8_per_tensor", "nvfp4")  # a scale is taken over all rows of a section
FEATURES = {CpuFeatures(native_bf16=False), CpuFeatures.detect()}
SHAPES = [((101,), 100), ((96, 40, 40), 144), ((130, 5), 257), ((1,), 1)]


def _weight(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns)).mul_(0.05).bfloat16()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", {"weight": ((131, 257), DType.BF16)}),
        ("fp8_per_tensor", {"weight": ((131, 257), DType.F8_E4M3), "weight_scale": ((2,), DType.F32)}),
        ("fp8_per_channel", {"weight": ((131, 257), DType.F8_E4M3), "weight_scale": ((131,), DType.F32)}),
        # Sections of 130 and 1 rows: two blocks and one; 257 columns: three blocks.
        ("fp8_per_block", {"weight": ((131, 257), DType.F8_E4M3), "weight_scale": ((3, 3), DType.F32)}),
        ("int8_per_channel", {"weight": ((131, 257), DType.I8), "weight_scale": ((131,), DType.F32)}),
        ("int4_per_group", {"weight": ((131, 129), DType.U8), "weight_scale": ((131, 9), DType.BF16)}),
        (
            "int4_per_group:64:asym",
            {
                "weight": ((131, 129), DType.U8),
                "weight_scale": ((131, 5), DType.BF16),
                "weight_zero_point": ((131, 5), DType.U8),
            },
        ),
        ("mxfp8", {"weight": ((131, 257), DType.F8_E4M3), "weight_scale": ((131, 9), DType.F8_E8M0)}),
        ("mxfp4", {"weight": ((131, 129), DType.U8), "weight_scale": ((131, 9), DType.F8_E8M0)}),
        (
            "nvfp4",
            {
                "weight": ((131, 129), DType.U8),
                "weight_scale": ((131, 17), DType.F8_E4M3),
                "weight_global_scale": ((2,), DType.F32),
            },
        ),
    ],
)
def test_storage_of_two_sections(name: str, expected: dict[str, tuple[tuple[int, ...], DType]]) -> None:
    specs = scheme_by_name(name).storage((130, 1), 257, wide=DType.BF16)
    assert {key: (spec.shape, spec.dtype) for key, spec in specs.items()} == expected


@pytest.mark.parametrize(("sections", "columns"), SHAPES)
@pytest.mark.parametrize("name", QUANTIZED)
def test_dequantized_weight_is_within_the_formats_error(name: str, sections: tuple[int, ...], columns: int) -> None:
    scheme, weight = scheme_by_name(name), _weight(sum(sections), columns)
    wide = scheme.dequantize(quantized(scheme, weight, sections), sections, dtype=torch.float32)[:, :columns]
    largest = weight.float().abs().amax()
    # e4m3fn: half a unit of three mantissa bits, or half the smallest step, 2^-10 of a scale of amax / 448.
    # int8: half a step of amax / 127. Both with room for float32's own rounding.
    bound = largest / 254 if name.startswith("int8") else weight.float().abs() / 16 + largest / 448 / 1024
    # MX scales are powers of two: up to 512 becomes 448, and up to 8 becomes 6. e2m1: half a step of a scale of
    # amax / 4 (less with nvfp4's).
    if name == "mxfp8":
        bound = weight.float().abs() / 8 + largest / 256 / 1024
    if name in ("mxfp4", "nvfp4"):
        bound = weight.float().abs() / 4 + largest / 16
    if name == "int4_per_group":  # half a step of amax / 8, and a whole one where the code 8 is missing
        bound = largest / 8
    assert bool(((wide - weight.float()).abs() <= bound * 1.0001).all())


@pytest.mark.parametrize(("sections", "columns"), SHAPES)
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_section_is_quantized_as_if_it_were_alone(name: str, sections: tuple[int, ...], columns: int) -> None:
    scheme, weight = scheme_by_name(name), _weight(sum(sections), columns)
    together = quantized(scheme, weight, sections)
    for index, rows in enumerate(weight.split(list(sections))):
        alone = quantized(scheme, rows, (rows.shape[0],))
        views = scheme.section_views(together, sections, index)
        assert views.keys() == alone.keys()
        for key, view in views.items():
            assert torch.equal(view.float(), alone[key].float()), key


def test_a_change_in_one_section_leaves_the_others_alone() -> None:
    weight = _weight(200, 144)
    for name in QUANTIZED:
        scheme = scheme_by_name(name)
        before = quantized(scheme, weight, (120, 80))
        louder = weight.clone()
        louder[120:] *= 64
        after = quantized(scheme, louder, (120, 80))
        for key in before:
            first = (scheme.section_views(stored, (120, 80), 0)[key].float() for stored in (before, after))
            assert torch.equal(*first), (name, key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name in QUANTIZED if name.startswith(("fp8", "int8"))])
def test_dequantize_rounds_the_float32_product_once(name: str, dtype: torch.dtype) -> None:
    scheme, sections = scheme_by_name(name), (130, 5)
    stored = quantized(scheme, _weight(135, 257), sections)
    scale = stored["weight_scale"]
    expected = torch.empty(135, 257)
    for row in range(135):
        section = 0 if row < 130 else 1
        for first in range(0, 257, 128):
            one = {
                "fp8_per_tensor": lambda row, section, first: scale[section],
                "fp8_per_block": lambda row, section, first: scale[row // 128 if section == 0 else 2, first // 128],
            }.get(name, lambda row, section, first: scale[row])(row, section, first)
            expected[row, first : first + 128] = stored["weight"][row, first : first + 128].float() * one
    assert torch.equal(scheme.dequantize(stored, sections, dtype=dtype), expected.to(dtype))


# The largest error over the largest output. float32 keeps the sums; the others round a product and its scale.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads cost more than they bring where every tensor is small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("name", scheme_names())
def test_linear_is_a_product_with_the_dequantized_weight(name: str, dtype: torch.dtype) -> None:
    scheme = scheme_by_name(name)
    generator = torch.Generator().manual_seed(5)
    for sections, columns in SHAPES:
        weight = _weight(sum(sections), columns)
        stored = {"weight": weight.to(dtype)} if name == "none" else quantized(scheme, weight, sections)
        exact = scheme.dequantize(stored, sections, dtype=torch.float32)[:, :columns].double()
        for rows in (1, 2, 8, 33, 300):
            x = torch.randn(rows, columns, generator=generator).to(dtype)
            bias = torch.randn(sum(sections), generator=generator).to(dtype)
            expected = x.double() @ exact.t() + bias.double()
            bound = BOUNDS[dtype] * expected.abs().max()
            for mode, features in product(KernelMode, FEATURES):
                kernels = Kernels(mode, features)
                found = scheme.linear(x.view(1, rows, columns), stored, sections, bias, kernels=kernels)
                assert found.dtype == dtype
                assert found.shape == (1, rows, sum(sections))
                error = (found[0].double() - expected).abs().max()
                assert error < bound, (sections, columns, rows, mode, features)


@pytest.mark.parametrize("name", scheme_names())
def test_activations_may_be_a_strided_view(name: str) -> None:
    scheme, kernels = scheme_by_name(name), Kernels.detect()
    weight = _weight(64, 48)
    stored = {"weight": weight} if name == "none" else quantized(scheme, weight, (64,))
    for rows in (1, 3):
        x = torch.randn(48, rows, generator=torch.Generator().manual_seed(6)).bfloat16().t()
        found = scheme.linear(x, stored, (64,), None, kernels=kernels)
        assert torch.equal(found, scheme.linear(x.contiguous(), stored, (64,), None, kernels=kernels))


@pytest.mark.parametrize("name", QUANTIZED)
def test_runs_of_rows_can_be_quantized_one_by_one(name: str) -> None:
    """What `row_multiple` promises: the loader cuts a large section into runs of that many rows."""
    scheme, weight = scheme_by_name(name), _weight(300, 257)
    if scheme.row_multiple == 0:  # the scale is taken over all rows: a run of its own has another
        assert name in OVER_ALL_ROWS
        return
    whole = quantized(scheme, weight, (300,))
    for start in range(0, 300, scheme.row_multiple):
        stop = min(300, start + scheme.row_multiple)
        alone = quantized(scheme, weight[start:stop], (stop - start,))
        first = start // scheme.row_multiple
        assert torch.equal(alone["weight"].float(), whole["weight"][start:stop].float())
        scales = whole["weight_scale"][first : first + alone["weight_scale"].shape[0]]
        assert torch.equal(alone["weight_scale"].float(), scales.float())


@pytest.mark.parametrize("fault", [math.nan, math.inf])
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_fault_in_the_weight_shows_in_its_row_of_the_product(name: str, fault: float) -> None:
    scheme, weight = scheme_by_name(name), _weight(140, 144)
    weight[135, 7] = fault
    stored = quantized(scheme, weight, (140,))
    for rows in (1, 8, 33):
        x = torch.ones(rows, 144, dtype=torch.bfloat16)
        for features in (CpuFeatures(native_bf16=False), CpuFeatures.detect()):
            out = scheme.linear(x, stored, (140,), None, kernels=Kernels(features=features))
            assert not out[:, 135].isfinite().any()
            assert name in OVER_ALL_ROWS or bool(out[:, :128].isfinite().all())


def test_a_bias_is_optional() -> None:
    kernels, weight, x = Kernels.detect(), _weight(135, 144), torch.randn(3, 144).bfloat16()
    for name in scheme_names():
        scheme = scheme_by_name(name)
        stored = {"weight": weight} if name == "none" else quantized(scheme, weight, (130, 5))
        zeros = torch.zeros(135, dtype=x.dtype)
        without = scheme.linear(x, stored, (130, 5), None, kernels=kernels)
        assert torch.equal(without, scheme.linear(x, stored, (130, 5), zeros, kernels=kernels)), name


def test_int8_with_float16_activations_does_not_overflow() -> None:
    scheme, sections = scheme_by_name("int8_per_channel"), (128,)
    stored = quantized(scheme, torch.full((128, 256), 0.01).bfloat16(), sections)
    x = torch.full((2, 256), 8.0, dtype=torch.float16)  # the true outputs are 256 * 8 * 0.01, about 20
    assert bool(scheme.linear(x, stored, sections, None, kernels=Kernels.detect()).isfinite().all())

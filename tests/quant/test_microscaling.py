"""mxfp8, mxfp4 and nvfp4 against a literal reading of their formats, in fractions."""

from __future__ import annotations

import ctypes
import math
from fractions import Fraction
from functools import cache

import pytest
import torch

from quant import e8m0
from quant.cpu_features import CpuFeatures
from quant.dtypes import DType, to_torch
from quant.kernels import Kernels
from quant.mx_codec import decode
from quant.mx_strips import ScaledBlocks
from quant.panels import Workspace
from quant.registry import scheme_by_name

MX = {"mxfp8": 8, "mxfp4": 2}  # the element type's largest exponent: OCP MX 1.0, table 1 and section 5.3
COLUMNS = [1, 15, 31, 32, 33, 77]


def _e2m1(code: int) -> Fraction:
    """OCP MX 1.0, 5.3.3: sign, 2 exponent bits (bias 1), 1 mantissa bit."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    size = Fraction(mantissa, 2) if exponent == 0 else (1 + Fraction(mantissa, 2)) * 2 ** (exponent - 1)
    return -size if sign else size


def _e4m3(code: int) -> Fraction | None:
    """OCP OFP8 1.0: sign, 4 exponent bits (bias 7), 3 mantissa bits; None for NaN."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    size = Fraction(mantissa, 8 * 64) if exponent == 0 else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    return -size if sign else size


def _e8m0(code: int) -> Fraction | None:
    """OCP MX 1.0, 5.4.1: 2^(code - 127); None for NaN."""
    return None if code == 255 else Fraction(2) ** (code - 127)


ELEMENTS = {"mxfp8": [_e4m3(code) for code in range(127)], "mxfp4": [_e2m1(code) for code in range(8)]}


@cache
def _nearest(name: str, number: Fraction) -> int:
    """The code of the nearest number of the element type; a tie goes to the even code, and the rest saturates."""
    numbers = ELEMENTS[name]
    gaps = [abs(abs(number) - found) for found in numbers if found is not None]
    least = min(gaps)
    codes = [code for code, gap in enumerate(gaps) if gap == least]
    return next((code for code in codes if code % 2 == 0), codes[0])


def _quantize(name: str, weight: torch.Tensor, sections: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    scheme, sections = scheme_by_name(name), sections or (weight.shape[0],)
    specs = scheme.storage(sections, weight.shape[1], wide=DType.F32)
    stored = {
        key: torch.full((math.prod(spec.shape) * spec.dtype.itemsize,), 77, dtype=torch.uint8)
        .view(to_torch(spec.dtype))
        .view(spec.shape)
        for key, spec in specs.items()
    }
    for index, rows in enumerate(weight.split(list(sections))):
        scheme.quantize_into(rows, scheme.section_views(stored, sections, index))
    return stored


def _codes(stored: dict[str, torch.Tensor]) -> list[list[int]]:
    """A code for each column (and one more where nibbles are odd in number)."""
    weight = stored["weight"]
    if weight.dtype != torch.uint8:
        return weight.view(torch.uint8).tolist()
    return [[nibble for byte in row for nibble in (byte & 15, byte >> 4)] for row in weight.tolist()]


def _tricky(columns: int) -> torch.Tensor:
    """Ties, numbers next to ties, both zeros, and blocks of very different sizes."""
    generator = torch.Generator().manual_seed(columns)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 0.0, -0.0, 2**-9, 3 * 2**-11, 464.0, 480.0, 511.9])
    chosen = ties[torch.randint(0, len(ties), (12, columns), generator=generator)]
    chosen *= torch.tensor([1, 1 + 2**-23, 1 - 2**-24, -1])[torch.randint(0, 4, chosen.shape, generator=generator)]
    sizes = torch.tensor([1.0, 1e-3, 2**-60, 2.0**-149, 2.0**-130, 2.0**100])
    chosen[::2] *= sizes[:, None]
    chosen[1::4] = torch.randn(3, columns, generator=generator)
    return chosen


# --- codes to numbers -----------------------------------------------------------------------------------------------


def test_every_scale_code_is_its_power_of_two() -> None:
    for codes in (torch.arange(256, dtype=torch.uint8), torch.arange(256, dtype=torch.uint8).view(16, 16)):
        for found in (e8m0.numbers(codes), e8m0.numbers(codes.view(torch.float8_e8m0fnu))):
            assert found.shape == codes.shape
            for code, number in enumerate(found.flatten().tolist()):
                expected = _e8m0(code)
                assert math.isnan(number) if expected is None else Fraction(number) == expected, code


def test_every_pair_of_a_four_bit_code_and_a_scale_dequantizes_to_the_bit() -> None:
    """Bytes 0x10, 0x32, ... hold the 16 codes, low nibble first; each row has one scale."""
    weight = torch.tensor([[code | (code + 1) << 4 for code in range(0, 16, 2)] * 2] * 256, dtype=torch.uint8)
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1)
    wide = _dequantized("mxfp4", {"weight": weight, "weight_scale": scale.view(torch.float8_e8m0fnu)})
    assert wide.shape == (256, 32)
    for code, row in enumerate(wide.tolist()):
        for column, number in enumerate(row):
            _assert_product(number, _e2m1(column % 16), _e8m0(code))


def test_every_pair_of_an_eight_bit_code_and_a_scale_dequantizes_to_the_bit() -> None:
    weight = torch.arange(256, dtype=torch.uint8).view(1, 256).repeat(256, 1).view(torch.float8_e4m3fn)
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1).repeat(1, 8).view(torch.float8_e8m0fnu)
    wide = _dequantized("mxfp8", {"weight": weight, "weight_scale": scale})
    elements = [_e4m3(code) for code in range(256)]
    for code, row in enumerate(wide.tolist()):
        for element, number in zip(elements, row, strict=True):
            _assert_product(number, element, _e8m0(code))


def test_every_pair_of_a_four_bit_code_and_an_e4m3_scale_dequantizes_to_the_bit() -> None:
    weight = torch.tensor([[code | (code + 1) << 4 for code in range(0, 16, 2)]] * 256, dtype=torch.uint8)
    scale = torch.arange(256, dtype=torch.uint8).view(256, 1).view(torch.float8_e4m3fn)
    factor = 0.0123
    stored = {"weight": weight, "weight_scale": scale, "weight_global_scale": torch.tensor([factor])}
    wide = _dequantized("nvfp4", stored)
    exact = Fraction(torch.tensor(factor).item())
    for code, row in enumerate(wide.tolist()):
        for column, number in enumerate(row):
            block = _e4m3(code)
            _assert_product(number, _e2m1(column) * exact, block)


def _dequantized(name: str, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    return scheme_by_name(name).dequantize(stored, (stored["weight"].shape[0],), dtype=torch.float32)


def _assert_product(number: float, code: Fraction | None, scale: Fraction | None) -> None:
    if code is None or scale is None:
        assert math.isnan(number)
        return
    exact = code * scale
    if abs(exact) >= 2**128:
        assert math.isinf(number)
    else:
        assert number == ctypes.c_float(float(exact)).value  # float() is exact here: 30 bits at the most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_expert_blocks_are_what_transformers_makes_of_them(dtype: torch.dtype) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 5, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 136, (3, 10, 5), generator=generator, dtype=torch.uint8)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype)  # [experts, I, O]
    ours = decode(blocks.flatten(-2), scales, block=32, in_features=160).to(dtype)
    assert ours.shape == (3, 10, 160)
    assert ours.dtype == dtype
    assert torch.equal(ours.transpose(1, 2), theirs)
    typed = decode(blocks.flatten(-2), scales.view(torch.float8_e8m0fnu), block=32, in_features=160)
    assert torch.equal(typed.to(dtype), ours)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_experts_in_front_change_nothing(name: str) -> None:
    weight = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    stored = _quantize(name, weight)
    block = 16 if name == "nvfp4" else 32
    flat = decode(stored["weight"], stored["weight_scale"], block=block, in_features=50)
    codes, scale = (stored[key].view(2, 3, -1) for key in ("weight", "weight_scale"))
    assert torch.equal(decode(codes, scale, block=block, in_features=50), flat.view(2, 3, 50))


# --- numbers to codes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("name", list(MX))
def test_codes_and_scales_are_the_specifications(name: str, columns: int) -> None:
    """OCP MX 1.0, section 6.3, in fractions: for every number, every scale."""
    weight = _tricky(columns)
    stored = _quantize(name, weight)
    scales, codes = stored["weight_scale"].view(torch.uint8).tolist(), _codes(stored)
    sign = 0x80 if name == "mxfp8" else 8
    for row, numbers in enumerate(weight.tolist()):
        for first in range(0, columns, 32):
            block = [Fraction(number) for number in numbers[first : first + 32]]
            amax = max(map(abs, block))
            exponent = math.frexp(float(amax))[1] - 1 - MX[name] if amax else -127
            scale = max(exponent, -127)
            assert scales[row][first // 32] == scale + 127
            for column, number in enumerate(block, start=first):
                negative = math.copysign(1, numbers[column]) < 0
                expected = _nearest(name, number / Fraction(2) ** scale) | (sign if negative else 0)
                assert codes[row][column] == expected, (row, column, numbers[column])


@pytest.mark.parametrize("columns", COLUMNS)
def test_nvfp4_codes_are_nearest_under_both_scales(columns: int) -> None:
    weight = torch.randn(7, columns, generator=torch.Generator().manual_seed(columns))
    weight[2] *= 1e-3
    weight[3] *= 1e-9  # its block scales round to zero
    weight[4] = 0
    stored = _quantize("nvfp4", weight, (4, 3))
    codes, blocks = _codes(stored), -(-columns // 16)
    for row, numbers in enumerate(weight.tolist()):
        section = slice(0, 4) if row < 4 else slice(4, 7)
        whole = weight[section].abs().max() / 2688
        assert torch.equal(stored["weight_global_scale"][0 if row < 4 else 1], whole)
        for block in range(blocks):
            part = torch.tensor(numbers[16 * block : 16 * block + 16])
            scale = (part.abs().max() / 6 / whole).clamp(max=448).to(torch.float8_e4m3fn).float()
            assert stored["weight_scale"][row, block].float() == scale
            for column, number in enumerate(part, start=16 * block):
                size = (number.abs() / (scale * whole)).item() if scale else 0.0
                assert codes[row][column] & 7 == _nearest("mxfp4", Fraction(size)), (row, column)
                assert bool(codes[row][column] & 8) == bool(number.signbit())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_half_precision_gets_the_codes_of_the_same_numbers_in_float32(name: str, dtype: torch.dtype) -> None:
    weight = torch.randn(40, 300, generator=torch.Generator().manual_seed(3)).to(dtype)
    half, single = _quantize(name, weight), _quantize(name, weight.float())
    for key, tensor in half.items():
        assert torch.equal(tensor.view(torch.uint8), single[key].view(torch.uint8)), key


@pytest.mark.parametrize("name", list(MX))
def test_zeros_have_the_smallest_scale_and_faults_have_nan(name: str) -> None:
    weight = torch.ones(4, 64)
    weight[0, :32] = 0
    weight[1, 40], weight[2, 3], weight[3, 63] = math.nan, math.inf, -math.inf
    stored = _quantize(name, weight)
    scales = stored["weight_scale"].view(torch.uint8).tolist()
    one = 127 - MX[name]
    assert scales == [[0, one], [one, 255], [255, one], [one, 255]]
    wide = _dequantized(name, stored)
    assert not wide[0, :32].any()
    assert bool(wide[1, 32:].isnan().all())
    assert bool((wide[1, :32] == 1).all())


def test_a_fault_is_not_hidden_in_nvfp4() -> None:
    for fault in (math.nan, math.inf, -math.inf):
        weight = torch.ones(3, 40)
        weight[1, 5] = fault
        stored = _quantize("nvfp4", weight)
        assert not stored["weight_global_scale"].isfinite().any()
        assert not _dequantized("nvfp4", stored).isfinite().any()


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_the_last_nibble_of_an_odd_row_is_zero(name: str) -> None:
    stored = _quantize(name, torch.full((3, 33), -5.0))
    assert bool((stored["weight"][:, -1] & 0xF0 == 0).all())


# --- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_strips_in_bfloat16_are_exact(name: str, columns: int) -> None:
    stored = _quantize(name, torch.randn(9, columns, generator=torch.Generator().manual_seed(4)))
    block = 16 if name == "nvfp4" else 32
    blocks = ScaledBlocks(stored["weight"], stored["weight_scale"], block)
    expected = decode(stored["weight"], stored["weight_scale"], block=block, in_features=columns)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full((5, columns), 77, dtype=dtype)
        blocks.widen(2, 7, out, Workspace())
        assert torch.equal(out.float(), expected[2:7])


def test_a_nan_among_nvfp4_scales_shows_in_its_row() -> None:
    stored = _quantize("nvfp4", torch.randn(4, 64, generator=torch.Generator().manual_seed(5)))
    stored["weight_scale"].view(torch.uint8)[2, 1] = 0x7F
    for rows in (1, 70):
        x = torch.ones(rows, 64, dtype=torch.bfloat16)
        for features in (CpuFeatures(native_bf16=False), CpuFeatures.detect()):
            kernels = Kernels(features=features)
            out = scheme_by_name("nvfp4").linear(x, stored, (4,), None, kernels=kernels)
            assert bool(out[:, 2].isnan().all())
            assert bool(out[:, [0, 1, 3]].isfinite().all())


def test_nothing_is_added_by_the_high_nibble_of_an_odd_row() -> None:
    """Foreign files may hold anything there."""
    stored = _quantize("mxfp4", torch.randn(4, 33, generator=torch.Generator().manual_seed(6)))
    x = torch.randn(3, 33, generator=torch.Generator().manual_seed(7))
    before = scheme_by_name("mxfp4").linear(x, stored, (4,), None, kernels=Kernels())
    stored["weight"][:, -1] |= 0xF0
    assert torch.equal(scheme_by_name("mxfp4").linear(x, stored, (4,), None, kernels=Kernels()), before)

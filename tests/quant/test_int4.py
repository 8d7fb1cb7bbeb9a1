"""Integer codes in groups, against the definition written out in numpy: codes, scales, zero points, products, tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from quant.cpu_features import CpuFeatures
from quant.dtypes import DType
from quant.errors import QuantError
from quant.int4 import IntPerGroup
from quant.kernels import KernelMode, Kernels
from quant.packed import pack, packed_nbytes
from quant.registry import scheme_by_name, scheme_names
from quant.tiled_int4 import Int4Tiled, most_rows
from streaming.panel_pool import PanelPool
from tests.quant.quantized import quantized

FORMS = [
    IntPerGroup(),
    IntPerGroup(group_size=64),
    IntPerGroup(group_size=128, symmetric=False),
    IntPerGroup(symmetric=False),
    IntPerGroup(group_size=0),
    IntPerGroup(group_size=0, symmetric=False),
    IntPerGroup(group_size=16, scale_dtype=DType.F16, symmetric=False),
    IntPerGroup(group_size=7, scale_dtype=DType.F32),
    IntPerGroup(bits=8),
    IntPerGroup(bits=8, symmetric=False, scale_dtype=DType.F16),
    IntPerGroup(ordered=True),
    IntPerGroup(ordered=True, symmetric=False, group_size=20),
    IntPerGroup(ordered=True, bits=8, group_size=64),
]
SHAPES = [((8,), 96), ((5, 3, 2), 101), ((1,), 1), ((40,), 160)]


def _weight(rows: int, columns: int, *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    return torch.randn(rows, columns, generator=generator).mul_(0.05).to(dtype)


# --- the definition, number by number ---------------------------------------------------------------------------------


def _rounded(number: np.float32, dtype: DType) -> np.float32:
    """To the nearest number of the dtype, a tie to the even one."""
    if dtype is DType.F16:
        return np.float32(np.float16(number))
    if dtype is DType.F32:
        return number
    bits = int(number.view(np.uint32))
    return np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def _literal_group(numbers: np.ndarray, scheme: IntPerGroup) -> tuple[np.ndarray, np.float32, int]:
    """Codes, scale and zero of one group of float32 numbers."""
    levels = 2**scheme.bits
    if scheme.symmetric:
        low, high = numbers.min(), numbers.max()
        peak = max(high, -low)
        exact, zero = peak / np.float32(levels // 2 - 1), levels // 2
    else:
        low, high = min(numbers.min(), np.float32(0)), max(numbers.max(), np.float32(0))
        exact, zero = (high - low) / np.float32(levels - 1), 0
    scale = _rounded(np.float32(exact), scheme.scale_dtype)
    scale = np.float32(1) if scale == 0 else scale
    if not scheme.symmetric:
        zero = int(np.clip(np.rint(-low / scale), 0, levels - 1))
    codes = np.clip(np.rint(numbers / scale) + zero, 0, levels - 1)
    return codes.astype(np.uint8), scale, zero


def _literal(weight: torch.Tensor, scheme: IntPerGroup) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes [R, I], scales [R, G], zeros [R, G] and the numbers that they stand for [R, I], group by group."""
    wide = weight.float().numpy()
    size = scheme.group_size or wide.shape[1]
    starts = range(0, wide.shape[1], size)
    codes, numbers = np.zeros(wide.shape, np.uint8), np.zeros(wide.shape, np.float32)
    scales = np.zeros((len(wide), len(starts)), np.float32)
    zeros = np.zeros((len(wide), len(starts)), np.uint8)
    for row in range(len(wide)):
        for group, start in enumerate(starts):
            run = slice(start, start + size)
            found, scale, zero = _literal_group(wide[row, run], scheme)
            codes[row, run], scales[row, group], zeros[row, group] = found, scale, zero
            numbers[row, run] = (found.astype(np.float32) - np.float32(zero)) * scale
    return codes, scales, zeros, numbers


def _bytes(codes: np.ndarray, bits: int) -> np.ndarray:
    if bits == 8:
        return codes
    padded = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    packed: np.ndarray = padded[:, 0::2] | padded[:, 1::2] << 4
    return packed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("sections", "columns"), SHAPES)
@pytest.mark.parametrize("scheme", FORMS, ids=lambda scheme: f"{scheme.name}-{scheme.scale_dtype.value}")
def test_what_is_stored_is_the_definition_to_the_bit(
    scheme: IntPerGroup, sections: tuple[int, ...], columns: int, dtype: torch.dtype
) -> None:
    weight = _weight(sum(sections), columns, dtype=dtype)
    stored = quantized(scheme, weight, sections)
    codes, scales, zeros, numbers = _literal(weight, scheme)
    assert np.array_equal(stored["weight"].numpy(), _bytes(codes, scheme.bits))
    assert np.array_equal(stored["weight_scale"].float().numpy(), scales)
    if not scheme.symmetric:
        assert np.array_equal(stored["weight_zero_point"].numpy(), zeros)
    if scheme.ordered:
        assert stored["g_idx"].tolist() == [[column // scheme.group_size for column in range(columns)]] * len(sections)
    found = scheme.dequantize(stored, sections, dtype=torch.float32, in_features=columns)
    assert np.array_equal(found.numpy(), numbers)
    for wide in (torch.bfloat16, torch.float16):
        rounded = scheme.dequantize(stored, sections, dtype=wide, in_features=columns)
        assert torch.equal(rounded, torch.from_numpy(numbers).to(wide))


def test_weights_of_several_strips_are_encoded_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = _weight(70, 101)
    for scheme in FORMS:
        whole = quantized(scheme, weight, (70,))
        with monkeypatch.context() as patch:
            patch.setattr("quant.int4_codec._STRIP_NBYTES", 3 * 4 * 101)
            strips = quantized(scheme, weight, (70,))
        for name, tensor in whole.items():
            assert torch.equal(tensor, strips[name]), (scheme.name, name)


def test_every_code_with_every_zero_stands_for_its_number() -> None:
    """16 codes in a row, a row for each zero point and scale."""
    scheme = IntPerGroup(symmetric=False, group_size=16)
    codes = np.tile(np.arange(16, dtype=np.uint8), (48, 1))
    scales = torch.tensor([0.0078125, 1.0, -2.5]).bfloat16().repeat_interleave(16)[:, None]
    zeros = torch.arange(16, dtype=torch.uint8).repeat(3)[:, None]
    stored = {"weight": torch.from_numpy(_bytes(codes, 4)), "weight_scale": scales, "weight_zero_point": zeros}
    expected = [[(code - zero) * scale for code in range(16)] for scale in (0.0078125, 1.0, -2.5) for zero in range(16)]
    assert scheme.dequantize(stored, (48,), dtype=torch.float32).tolist() == expected


def test_an_odd_number_of_inputs_leaves_the_last_high_nibble_zero() -> None:
    scheme, weight = IntPerGroup(), _weight(6, 45)
    stored = quantized(scheme, weight, (6,))
    assert stored["weight"].shape == (6, 23)
    assert not bool((stored["weight"][:, -1] >> 4).any())
    assert scheme.dequantize(stored, (6,), dtype=torch.float32).shape == (6, 46)  # as long as no number is given


# --- faults and extremes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", FORMS, ids=lambda scheme: scheme.name)
def test_zeros_give_exact_zeros(scheme: IntPerGroup) -> None:
    weight = _weight(6, 96)
    weight[2, 32:64] = 0
    weight[4] = 0
    stored = quantized(scheme, weight, (6,))
    found = scheme.dequantize(stored, (6,), dtype=torch.float32)
    assert not found[2, 32:64].any()
    assert not found[4].any()
    assert bool((stored["weight_scale"][4] == 1).all())


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scheme", FORMS, ids=lambda scheme: scheme.name)
def test_a_fault_shows_in_its_group_and_nowhere_else(scheme: IntPerGroup, fault: float) -> None:
    weight = _weight(6, 96)
    weight[3, 70] = fault
    stored = quantized(scheme, weight, (6,))
    found = scheme.dequantize(stored, (6,), dtype=torch.float32)
    assert not found[3, 70].isfinite()
    assert stored["weight_scale"].isfinite().logical_not().nonzero().tolist() == [[3, 70 // (scheme.group_size or 96)]]
    assert bool(found[torch.arange(6) != 3].isfinite().all())


def test_numbers_too_small_for_a_scale_become_zero() -> None:
    scheme = IntPerGroup(scale_dtype=DType.F16)
    weight = torch.full((2, 32), 1e-9)
    stored = quantized(scheme, weight, (2,))
    assert not scheme.dequantize(stored, (2,), dtype=torch.float32).any()


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("int4_per_group", 20.1), ("int4_per_group:64", 19.2), ("int4_per_group:128", 18.5),
        ("int4_per_group:asym", 21.7),
    ],
)  # fmt: skip
def test_noise_of_normal_numbers(name: str, least: float) -> None:
    scheme = scheme_by_name(name)
    assert isinstance(scheme, IntPerGroup)
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    found = scheme.dequantize(quantized(scheme, weight, (1024,)), (1024,), dtype=torch.float32)
    noise = (found - weight).double().square().sum()
    assert 10 * math.log10(weight.double().square().sum() / noise) >= least


# --- products --------------------------------------------------------------------------------------------------------

# The largest error over the largest output. float32 keeps the sums; the others round a product and its scale.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def _expected(x: torch.Tensor, numbers: np.ndarray, bias: torch.Tensor | None) -> torch.Tensor:
    product = torch.from_numpy(x.double().numpy() @ numbers.astype(np.float64).T)
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("features", [CpuFeatures(native_bf16=False), CpuFeatures.detect()], ids=["plain", "detected"])
@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("scheme", FORMS, ids=lambda scheme: f"{scheme.name}-{scheme.scale_dtype.value}")
def test_the_product_is_that_of_the_numbers(scheme: IntPerGroup, dtype: torch.dtype, features: CpuFeatures) -> None:
    generator = torch.Generator().manual_seed(3)
    for sections, columns in SHAPES:
        weight = _weight(sum(sections), columns)
        stored, (*_, numbers) = quantized(scheme, weight, sections), _literal(weight, scheme)
        for rows in (1, 3, 33, 70):
            x = torch.randn(rows, columns, generator=generator).to(dtype)
            bias = torch.randn(sum(sections), generator=generator).to(dtype) if rows != 3 else None
            expected = _expected(x, numbers, bias)
            found = scheme.linear(x.view(1, rows, columns), stored, sections, bias, kernels=Kernels(features=features))
            assert (found.shape, found.dtype) == ((1, rows, sum(sections)), dtype)
            assert (found[0].double() - expected).abs().max() / expected.abs().max() < BOUNDS[dtype]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_take_the_groups_that_their_order_says(bits: int, symmetric: bool) -> None:
    """Each section has an order of its own; a permuted weight with permuted groups gives a permuted result."""
    plain = IntPerGroup(bits=bits, symmetric=symmetric)
    ordered = replace(plain, ordered=True)
    weight, sections = _weight(12, 96), (8, 4)
    stored = quantized(plain, weight, sections)
    order = [torch.randperm(96, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    exact = plain.dequantize(stored, sections, dtype=torch.float32)
    expected = torch.cat([rows[:, index] for rows, index in zip(exact.split([8, 4]), order, strict=True)])
    codes = stored["weight"].numpy()
    codes = codes if bits == 8 else np.stack((codes & 15, codes >> 4), 2).reshape(12, 96)
    turned = np.concatenate([codes[:8][:, order[0].numpy()], codes[8:][:, order[1].numpy()]])
    stored["weight"] = torch.from_numpy(_bytes(turned, bits))
    stored["g_idx"] = torch.stack([index // 32 for index in order]).int()
    assert torch.equal(ordered.dequantize(stored, sections, dtype=torch.float32), expected)
    for rows in (1, 70):
        x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows))
        found = ordered.linear(x, stored, sections, None, kernels=Kernels())
        product = x.double() @ expected.double().t()
        assert (found.double() - product).abs().max() / product.abs().max() < 1e-5


def test_strips_in_bfloat16_hold_the_numbers_rounded_once() -> None:
    """With the identity for activations, a product in bfloat16 shows the strip itself."""
    for scheme in FORMS:
        weight = _weight(64, 96)
        stored, (*_, numbers) = quantized(scheme, weight, (64,)), _literal(weight, scheme)
        kernels = Kernels(features=CpuFeatures(native_bf16=True))
        found = scheme.linear(torch.eye(96).bfloat16(), stored, (64,), None, kernels=kernels)
        assert torch.equal(found.t(), torch.from_numpy(numbers).bfloat16()), scheme.name


# --- tiles -----------------------------------------------------------------------------------------------------------

TILED = [
    IntPerGroup(group_size=size, symmetric=symmetric) for size in (32, 64, 128, 256) for symmetric in (True, False)
]


@pytest.fixture
def fast() -> Kernels:
    if not most_rows():
        pytest.skip("torch's int4 product has no vectors here")
    return Kernels.detect(mode=KernelMode.FAST)


@pytest.fixture
def three_threads() -> Iterator[Kernels]:
    pool = PanelPool(3)
    yield Kernels.detect(mode=KernelMode.FAST, run=pool)
    pool.close()


def _tiled(scheme: IntPerGroup, stored: dict[str, torch.Tensor], kernels: Kernels) -> Int4Tiled:
    (found,) = pack([(scheme, stored)], kernels=kernels)
    assert isinstance(found, Int4Tiled)
    return found


@pytest.mark.parametrize("scheme", TILED, ids=lambda scheme: scheme.name)
def test_the_tiled_product_is_that_of_the_numbers(scheme: IntPerGroup, fast: Kernels) -> None:
    for rows_out in (16, 80, 208):  # less than a tile, a tile and a part, several
        weight = _weight(rows_out, 512)
        stored = quantized(scheme, weight, (rows_out,))
        numbers = scheme.dequantize(stored, (rows_out,), dtype=torch.float32).numpy()  # compared to the bit above
        tiled = _tiled(scheme, stored, fast)
        for rows in (1, 5, most_rows()):
            x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows)).bfloat16()
            bias = torch.randn(rows_out, generator=torch.Generator().manual_seed(9)).bfloat16()
            expected = _expected(x, numbers, bias)
            found = tiled.linear(x.view(1, rows, 512), bias)
            assert found is not None
            assert (found.shape, found.dtype) == ((1, rows, rows_out), torch.bfloat16)
            assert (found[0].double() - expected).abs().max() / expected.abs().max() < 1.2e-2


def test_an_odd_number_of_inputs_is_tiled_with_one_more(fast: Kernels) -> None:
    weight = _weight(16, 63)
    stored, (*_, numbers) = quantized(IntPerGroup(), weight, (16,)), _literal(weight, IntPerGroup())
    tiled, x = _tiled(IntPerGroup(), stored, fast), torch.randn(2, 63, generator=torch.Generator().manual_seed(2))
    assert packed_nbytes(IntPerGroup(), (16,), 63) == tiled.nbytes
    found, expected = tiled.linear(x.bfloat16(), None), _expected(x.bfloat16(), numbers, None)
    assert found is not None
    assert (found.double() - expected).abs().max() / expected.abs().max() < 1.2e-2


def test_other_activations_are_left_to_the_stored_form(fast: Kernels) -> None:
    tiled = _tiled(IntPerGroup(), quantized(IntPerGroup(), _weight(16, 64), (16,)), fast)
    assert tiled.linear(torch.ones(most_rows(), 64).bfloat16(), None) is not None
    for wrong in (torch.ones(most_rows() + 1, 64).bfloat16(), torch.ones(1, 64), torch.ones(1, 64).half()):
        assert tiled.linear(wrong, None) is None


def test_bits_of_the_tiled_product_depend_neither_on_threads_nor_on_other_rows(
    fast: Kernels, three_threads: Kernels
) -> None:
    scheme, x = IntPerGroup(), torch.randn(7, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    stored, before, found = quantized(scheme, _weight(1040, 1024), (1040,)), torch.get_num_threads(), []
    try:
        for kernels in (fast, three_threads):
            tiled = _tiled(scheme, stored, kernels)
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found += [tiled.linear(x, None), torch.cat([_one(tiled, row) for row in x.split(1)])]
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert other is not None
        assert found[0] is not None
        assert torch.equal(other, found[0])


def _one(tiled: Int4Tiled, row: torch.Tensor) -> torch.Tensor:
    found = tiled.linear(row, None)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("scheme", "rows", "columns"),
    [
        (IntPerGroup(), 15, 64),  # the operator takes 16 rows
        (IntPerGroup(), 16, 80),  # a short last group
        (IntPerGroup(group_size=16), 16, 64),
        (IntPerGroup(group_size=0), 16, 64),
        (IntPerGroup(scale_dtype=DType.F32), 16, 64),
        (IntPerGroup(bits=8), 16, 64),
        (IntPerGroup(ordered=True), 16, 64),
    ],
    ids=str,
)
def test_what_the_operator_does_not_take_stays_as_it_is(
    scheme: IntPerGroup, rows: int, columns: int, fast: Kernels
) -> None:
    stored = quantized(scheme, _weight(rows, columns), (rows,))
    assert pack([(scheme, stored)], kernels=fast) == [None]
    assert packed_nbytes(scheme, (rows,), columns) == 0


def test_a_cpu_without_vectors_for_it_has_no_tiled_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    stored = quantized(IntPerGroup(), _weight(16, 64), (16,))
    assert pack([(IntPerGroup(), stored)], kernels=Kernels()) == [None]


@pytest.mark.parametrize("scheme", TILED, ids=lambda scheme: scheme.name)
def test_what_a_tiled_copy_takes(scheme: IntPerGroup, fast: Kernels) -> None:
    stored = quantized(scheme, _weight(48, 512), (32, 16))
    # Half a byte a number, and two bfloat16 a group.
    expected = 48 * 256 + 48 * (512 // scheme.group_size) * 4
    assert packed_nbytes(scheme, (32, 16), 512) == expected == _tiled(scheme, stored, fast).nbytes


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("int4_per_group", IntPerGroup()),
        ("int4_per_group:64", IntPerGroup(group_size=64)),
        ("int4_per_group:128:asym", IntPerGroup(group_size=128, symmetric=False)),
        ("int4_per_group:asym", IntPerGroup(symmetric=False)),
    ],
)
def test_names_say_group_and_symmetry(name: str, expected: IntPerGroup) -> None:
    assert scheme_by_name(name) == expected
    assert expected.name == name
    assert "int4_per_group" in scheme_names()


def test_the_default_can_be_named_in_full() -> None:
    assert scheme_by_name("int4_per_group:32") == scheme_by_name("int4_per_group")


@pytest.mark.parametrize("name", ["33", "asym:64", "64:64", "asym:asym", "", "64:sym", "064"])
def test_a_wrong_suffix_is_answered_with_the_right_ones(name: str) -> None:
    with pytest.raises(QuantError, match=r"'int4_per_group:.*int4_per_group\[:32\|64\|128\]\[:asym\]") as caught:
        scheme_by_name(f"int4_per_group:{name}")
    assert "\n" not in str(caught.value)


def test_other_schemes_take_no_suffix() -> None:
    with pytest.raises(QuantError, match="'fp8_per_tensor:64': fp8_per_tensor takes nothing behind a colon"):
        scheme_by_name("fp8_per_tensor:64")


@pytest.mark.parametrize("wrong", [{"bits": 3}, {"group_size": -1}])
def test_a_form_that_there_is_not_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(QuantError, match="bits are 4 or 8"):
        IntPerGroup(**wrong)  # type: ignore[arg-type]

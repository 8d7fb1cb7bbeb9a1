"""Which product runs on a device, as a table; what is not a CPU here is described, not asked."""

from __future__ import annotations

import pytest
import torch

from quant.device_choice import DeviceProduct, ProductShape, StoredForm, choose_product
from quant.device_features import DeviceFeatures
from quant.device_products import OnDevice
from quant.kernels import KernelMode, Kernels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS, BLOCKS, FP4 = StoredForm.FLOAT8_ROWS, StoredForm.FLOAT8_BLOCKS, StoredForm.FLOAT4
INTEGERS, OTHER = StoredForm.INTEGERS, StoredForm.OTHER
STRIPS, TRITON = DeviceProduct.STRIPS, DeviceProduct.TRITON
SCALED_ROWS, SCALED_SUMS = DeviceProduct.SCALED_ROWS, DeviceProduct.SCALED_SUMS


def chosen(
    form: StoredForm,
    capability: tuple[int, int] | None,
    *,
    triton: bool = True,
    fast: bool = False,
    tokens: int = 8,
    outputs: int = 64,
    inputs: int = 256,
    dtype: torch.dtype = BF16,
    columns: int = 0,
) -> DeviceProduct:
    shape = ProductShape(tokens, outputs, inputs, dtype, columns)
    return choose_product(form, shape, features=DeviceFeatures(capability, triton), round_activations=fast)


@pytest.mark.parametrize("form", [ROWS, BLOCKS, FP4, INTEGERS])
@pytest.mark.parametrize(
    ("capability", "triton", "expected"),
    [
        (None, True, STRIPS), ((7, 5), True, STRIPS), ((8, 0), True, TRITON), ((8, 9), True, TRITON),
        ((9, 0), True, TRITON), ((12, 0), True, TRITON), ((9, 0), False, STRIPS),
    ],
)  # fmt: skip
def test_activations_as_they_are(
    form: StoredForm, capability: tuple[int, int] | None, triton: bool, expected: DeviceProduct
) -> None:
    assert chosen(form, capability, triton=triton) is expected


@pytest.mark.parametrize(
    ("columns", "expected"), [(0, TRITON), (16, TRITON), (48, TRITON), (128, TRITON), (24, STRIPS), (300, TRITON)]
)
def test_scales_that_tiles_can_follow(columns: int, expected: DeviceProduct) -> None:
    assert chosen(INTEGERS, (9, 0), columns=columns) is expected


@pytest.mark.parametrize(
    ("tokens", "dtype", "expected"),
    [(1, BF16, TRITON), (512, FP16, TRITON), (513, BF16, STRIPS), (0, BF16, STRIPS), (1, FP32, STRIPS)],
)
def test_tokens_and_dtypes(tokens: int, dtype: torch.dtype, expected: DeviceProduct) -> None:
    assert chosen(BLOCKS, (9, 0), tokens=tokens, dtype=dtype) is expected


def test_an_order_of_inputs_goes_through_strips() -> None:
    assert chosen(OTHER, (9, 0)) is STRIPS


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((8, 0), BF16, TRITON), ((8, 9), BF16, SCALED_ROWS), ((9, 0), BF16, SCALED_ROWS), ((10, 0), BF16, SCALED_ROWS),
        ((10, 3), BF16, SCALED_ROWS), ((12, 0), BF16, SCALED_SUMS), ((9, 0), FP16, SCALED_SUMS),
        ((9, 0), FP32, SCALED_SUMS), (None, BF16, STRIPS),
    ],
)  # fmt: skip
def test_activations_that_may_be_rounded(
    capability: tuple[int, int] | None, dtype: torch.dtype, expected: DeviceProduct
) -> None:
    assert chosen(ROWS, capability, dtype=dtype, fast=True) is expected


@pytest.mark.parametrize(("outputs", "inputs"), [(72, 256), (64, 264)])
def test_sizes_that_are_no_multiples_of_16_are_not_rounded(outputs: int, inputs: int) -> None:
    assert chosen(ROWS, (9, 0), outputs=outputs, inputs=inputs, fast=True) is TRITON


@pytest.mark.parametrize("form", [BLOCKS, FP4, INTEGERS])
def test_only_scales_of_rows_are_multiplied_in_8_bits(form: StoredForm) -> None:
    assert chosen(form, (9, 0), fast=True) is TRITON


def test_activations_are_rounded_without_triton_and_with_many_tokens_too() -> None:
    assert chosen(ROWS, (9, 0), fast=True, triton=False, tokens=4096) is SCALED_ROWS


def test_a_device_of_another_kind_has_no_features() -> None:
    assert DeviceFeatures.detect(torch.device("meta"), triton=True) == DeviceFeatures(None, True)


@pytest.mark.parametrize("mode", list(KernelMode))
def test_the_fast_mode_alone_rounds_activations(mode: KernelMode) -> None:
    found = Kernels(mode, triton=True)._on_device(torch.empty(1, device="meta"))
    features = DeviceFeatures() if mode is KernelMode.EXACT else DeviceFeatures(None, True)
    assert found == OnDevice(features, round_activations=mode is KernelMode.FAST)


def test_strips_are_the_product_where_nothing_is_known() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 24, generator=generator).to(torch.float8_e4m3fn)
    scale, x = torch.rand(40, generator=generator), torch.randn(2, 3, 24, generator=generator)
    wide = weight.float() * scale.unsqueeze(1)
    found = OnDevice(DeviceFeatures()).float8_rows(x, weight, scale, None, widen=lambda start, stop: wide[start:stop])
    torch.testing.assert_close(found, x @ wide.t())

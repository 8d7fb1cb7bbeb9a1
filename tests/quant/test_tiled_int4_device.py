"""The copy of 4-bit codes for torch's int4 product on a GPU: what is handed to the operator, and when.

Neither of the two operators runs here. Their converter is known by its shapes (torch's meta functions) and stands in as
what its input means: two codes a byte, the even input's in the high half; the product as (code - 8) * scale + zero.
"""

from __future__ import annotations

import pytest
import torch

from quant.device_features import DeviceFeatures
from quant.dtypes import DType, to_torch
from quant.int4 import IntPerGroup
from quant.int8 import Int8PerChannel
from quant.kernels import Kernels
from quant.packed import pack, packed_nbytes
from quant.scheme import Scheme
from quant.tiled_int4 import tiled_nbytes
from quant.tiled_int4_device import (
    INNER_TILES,
    MOST_ROWS,
    Int4TiledOnDevice,
    even_high,
    has_tiled_product,
    is_tileable,
    tile,
)

TILED = [IntPerGroup(group_size=size, symmetric=even) for size in (32, 64, 128, 256) for even in (True, False)]


def stored_on(device: str, scheme: Scheme, rows: int, columns: int) -> dict[str, torch.Tensor]:
    specs = scheme.storage((rows,), columns, wide=DType.BF16)
    return {name: torch.empty(spec.shape, dtype=to_torch(spec.dtype), device=device) for name, spec in specs.items()}


def quantized(scheme: Scheme, rows: int, columns: int) -> dict[str, torch.Tensor]:
    stored = stored_on("cpu", scheme, rows, columns)
    scheme.quantize_into(torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)), stored)
    return stored


def converted(packed: torch.Tensor, inner_tiles: int) -> torch.Tensor:
    """The operator's output as an int32 tensor of its shape whose bytes are still those of the input."""
    assert (packed.dtype, packed.is_contiguous(), inner_tiles) == (torch.uint8, True, 8)
    rows, width = packed.shape
    return packed.view(torch.int32).view(rows // 8, 2 * width // 128, 32, 4)


def multiplied(x: torch.Tensor, weight: torch.Tensor, group: int, both: torch.Tensor) -> torch.Tensor:
    assert x.is_contiguous()
    assert (x.dtype, both.dtype, both.shape[2]) == (torch.bfloat16, torch.bfloat16, 2)
    packed = weight.reshape(-1).view(torch.uint8).view(8 * weight.shape[0], -1)
    codes = torch.stack((packed >> 4, packed & 15), -1).flatten(1)
    scale, zero = (both[..., part].t().float().repeat_interleave(group, 1) for part in (0, 1))
    return (x.float() @ ((codes.float() - 8) * scale + zero).t()).bfloat16()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", converted)
    monkeypatch.setattr(torch, "_weight_int4pack_mm", multiplied)


def test_the_even_inputs_code_goes_to_the_high_half() -> None:
    stored = torch.tensor([[0x21, 0xF0, 0x0A]], dtype=torch.uint8)  # codes 1, 2, 0, 15, 10, 0
    assert even_high(stored).tolist() == [[0x12, 0x0F, 0xA0]]


@pytest.mark.parametrize("scheme", TILED, ids=lambda scheme: scheme.name)
def test_the_product_of_the_copy_is_that_of_the_numbers(scheme: IntPerGroup, stand_ins: None) -> None:
    stored = quantized(scheme, 24, 512)
    wide = scheme.dequantize(stored, (24,), dtype=torch.float64)
    copy = tile(stored, group_size=scheme.group_size)
    assert copy.nbytes == tiled_nbytes(scheme, 24, 512) == packed_nbytes(scheme, (16, 8), 512, device="cuda")
    assert copy.scales_and_zeros.shape == (512 // scheme.group_size, 24, 2)
    bias = torch.linspace(-1, 1, 24).bfloat16()
    for rows in (1, MOST_ROWS):
        x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows)).bfloat16()
        expected = x.double() @ wide.t() + bias.double()
        found = copy.linear(x.view(1, rows, 512), bias)
        assert found is not None
        assert (found.shape, found.dtype) == ((1, rows, 24), torch.bfloat16)
        assert (found[0].double() - expected).abs().max() / expected.abs().max() < 1.2e-2


def test_an_odd_number_of_inputs_is_tiled_with_one_more(stand_ins: None) -> None:
    scheme = IntPerGroup()
    stored = quantized(scheme, 8, 127)
    wide = scheme.dequantize(stored, (8,), dtype=torch.float64, in_features=127)
    assert is_tileable(scheme, 8, 127)
    copy, x = tile(stored, group_size=32), torch.randn(2, 127, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert copy.nbytes == packed_nbytes(scheme, (8,), 127, device="cuda")
    found = copy.linear(x, None)
    assert found is not None
    assert (found.double() - x.double() @ wide.t()).abs().max() < 0.2


def test_shapes_and_bytes_are_those_of_the_operator() -> None:
    """Through torch's own meta function of the converter."""
    for scheme in TILED:
        copy = tile(stored_on("meta", scheme, 64, 512), group_size=scheme.group_size)
        assert (copy.weight.shape, copy.weight.dtype) == ((8, 512 // (16 * INNER_TILES), 32, 4), torch.int32)
        assert copy.nbytes == tiled_nbytes(scheme, 64, 512)


def test_other_activations_are_left_to_the_stored_form(stand_ins: None) -> None:
    copy = tile(quantized(IntPerGroup(), 8, 128), group_size=32)
    assert copy.linear(torch.ones(MOST_ROWS, 128).bfloat16(), None) is not None
    many, none = torch.ones(MOST_ROWS + 1, 128).bfloat16(), torch.ones(0, 128).bfloat16()
    for wrong in (many, none, torch.ones(1, 128), torch.ones(1, 128).half()):
        assert copy.linear(wrong, None) is None


@pytest.mark.parametrize(
    ("scheme", "rows", "columns", "expected"),
    [
        (IntPerGroup(), 8, 128, True),
        (IntPerGroup(), 24, 4096, True),  # eights, where a CPU wants sixteens
        (IntPerGroup(), 12, 128, False),
        (IntPerGroup(), 0, 128, False),
        (IntPerGroup(), 8, 64, False),  # half a run of tiles
        (IntPerGroup(), 8, 192, False),
        (IntPerGroup(group_size=256), 8, 384, False),  # a short last group
        (IntPerGroup(group_size=16), 8, 128, False),
        (IntPerGroup(group_size=0), 8, 128, False),
        (IntPerGroup(scale_dtype=DType.F32), 8, 128, False),
        (IntPerGroup(bits=8), 8, 128, False),
        (IntPerGroup(ordered=True), 8, 128, False),
        (Int8PerChannel(), 8, 128, False),
    ],
    ids=str,
)
def test_what_the_operator_takes(scheme: Scheme, rows: int, columns: int, expected: bool) -> None:
    assert is_tileable(scheme, rows, columns) is expected
    assert (packed_nbytes(scheme, (rows,), columns, device="cuda") > 0) is expected


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (DeviceFeatures((8, 0)), True), (DeviceFeatures((9, 0), True), True), (DeviceFeatures((12, 0)), True),
        (DeviceFeatures((7, 5)), False), (DeviceFeatures(None, True), False), (DeviceFeatures(fnuz=True), False),
    ],
)  # fmt: skip
def test_devices_that_have_the_product(features: DeviceFeatures, expected: bool) -> None:
    assert has_tiled_product(features) is expected


@pytest.mark.parametrize(("capability", "made"), [((8, 0), True), ((7, 5), False), (None, False)])
def test_copies_are_made_on_devices_that_have_the_product(
    capability: tuple[int, int] | None, made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def detected(device: torch.device, *, triton: bool) -> DeviceFeatures:
        assert device.type == "meta"
        return DeviceFeatures(capability, triton)

    monkeypatch.setattr(DeviceFeatures, "detect", detected)
    schemes: list[Scheme] = [IntPerGroup(), Int8PerChannel(), IntPerGroup(bits=8)]
    found = pack([(scheme, stored_on("meta", scheme, 64, 256)) for scheme in schemes], kernels=Kernels())
    assert [isinstance(one, Int4TiledOnDevice) for one in found] == [made, False, False]

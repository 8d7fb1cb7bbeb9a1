"""What a device asks of stored weights, and that weights which have been through it hold the numbers they held."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from quant.device_choice import DeviceProduct, ProductShape, StoredForm, choose_product
from quant.device_features import DeviceFeatures, needs_fnuz
from quant.device_products import OnDevice
from quant.dtypes import DType, to_torch
from quant.errors import QuantError
from quant.float8 import Fp8PerBlock
from quant.kernels import KernelMode, Kernels
from quant.nf4 import Nf4
from quant.post_processing import Step, process, seen_processed, what_to_process
from quant.processed_scheme import Processed
from quant.registry import scheme_by_name, scheme_names
from quant.scaled_products import quantize_tokens
from quant.scheme import Scheme

FNUZ = DeviceFeatures(fnuz=True)
FLOAT8 = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
SECTIONS, COLUMNS = (130, 7), 200  # a block and a part, less than one


def quantized(scheme: Scheme) -> dict[str, torch.Tensor]:
    generator, stored = torch.Generator().manual_seed(3), {}
    for name, spec in scheme.storage(SECTIONS, COLUMNS, wide=DType.BF16).items():
        stored[name] = torch.empty(spec.shape, dtype=to_torch(spec.dtype))
    for index, rows in enumerate(SECTIONS):
        weight = torch.randn(rows, COLUMNS, generator=generator).mul_(0.02 * (1 + index))
        scheme.quantize_into(weight, scheme.section_views(stored, SECTIONS, index))
    return stored


@pytest.mark.parametrize("name", scheme_names())
def test_only_e4m3_under_float32_scales_is_processed_and_only_on_devices_of_e4m3fnuz(name: str) -> None:
    scheme = scheme_by_name(name)
    assert what_to_process(scheme, FNUZ) == ((Step.FNUZ,) if name in FLOAT8 else ())
    for features in (DeviceFeatures(), DeviceFeatures((8, 0), True), DeviceFeatures((9, 0), True)):
        assert what_to_process(scheme, features) == ()


@pytest.mark.parametrize("scheme", [Nf4.of("nf4", block=64, in_features=96), Fp8PerBlock(block=(64, 32))])
def test_schemes_that_only_checkpoints_have_are_told_apart_whatever_sizes_they_take(scheme: Scheme) -> None:
    assert what_to_process(scheme, FNUZ) == ((Step.FNUZ,) if isinstance(scheme, Fp8PerBlock) else ())


@pytest.mark.parametrize("name", FLOAT8)
def test_numbers_and_products_are_those_of_before_to_the_bit(name: str) -> None:
    scheme = scheme_by_name(name)
    before, after = quantized(scheme), quantized(scheme)
    after = process(after, (Step.FNUZ,))
    processed = Processed(scheme, (Step.FNUZ,))
    specs = processed.storage(SECTIONS, COLUMNS, wide=DType.BF16)
    assert {n: (tuple(t.shape), t.dtype) for n, t in after.items()} == {
        n: (s.shape, to_torch(s.dtype)) for n, s in specs.items()
    }
    assert torch.equal(after["weight_scale"], 2 * before["weight_scale"])
    wide = [one.dequantize(kept, SECTIONS, dtype=torch.float32) for one, kept in ((scheme, before), (processed, after))]
    assert torch.equal(*wide)
    for rows in (1, 20):
        x = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rows)).bfloat16()
        for mode in KernelMode:
            kernels = Kernels.detect(mode=mode)
            expected = scheme.linear(x, before, SECTIONS, None, kernels=kernels)
            assert torch.equal(processed.linear(x, after, SECTIONS, None, kernels=kernels), expected)


@pytest.mark.parametrize("name", FLOAT8)
def test_quantizing_into_processed_memory_gives_what_processing_gives(name: str) -> None:
    scheme = scheme_by_name(name)
    processed, wanted = Processed(scheme, (Step.FNUZ,)), process(quantized(scheme), (Step.FNUZ,))
    found = quantized(processed)
    for key, tensor in wanted.items():
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8))


def test_memory_stays_where_it_is_and_can_be_seen_before() -> None:
    stored = quantized(scheme_by_name("fp8_per_channel"))
    seen = seen_processed(stored, (Step.FNUZ,))
    after = process(stored, (Step.FNUZ,))
    for name, tensor in after.items():
        assert (seen[name].data_ptr(), seen[name].dtype) == (tensor.data_ptr(), tensor.dtype)
        assert torch.equal(seen[name].view(torch.uint8), tensor.view(torch.uint8))


def test_nothing_is_processed_twice() -> None:
    once = process(quantized(scheme_by_name("fp8_per_channel")), (Step.FNUZ,))
    scale = once["weight_scale"].clone()
    with pytest.raises(QuantError, match="made of float8_e4m3fn, not of float8_e4m3fnuz"):
        process(once, (Step.FNUZ,))
    assert torch.equal(once["weight_scale"], scale)


@pytest.mark.parametrize(
    ("arch", "expected"),
    [("gfx942:sramecc+:xnack-", True), ("gfx940", True), ("gfx90a", False), ("gfx950", False), ("gfx1100", False)],
)
def test_devices_of_e4m3fnuz_are_known_by_their_architecture(
    arch: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert needs_fnuz(arch) is expected
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(gcnArchName=arch))
    assert DeviceFeatures.detect(torch.device("cuda", 0), triton=True) == DeviceFeatures(None, True, expected)
    assert DeviceFeatures.detect(torch.device("cpu"), triton=True) == DeviceFeatures(None, True)


@pytest.mark.parametrize(
    ("tokens", "outputs", "fast", "expected"),
    [
        (8, 64, True, DeviceProduct.SCALED_SUMS), (8, 64, False, DeviceProduct.STRIPS),
        (8, 60, True, DeviceProduct.STRIPS), (0, 64, True, DeviceProduct.STRIPS),
    ],
)  # fmt: skip
def test_a_device_of_e4m3fnuz_multiplies_in_it_where_activations_may_be_rounded(
    tokens: int, outputs: int, fast: bool, expected: DeviceProduct
) -> None:
    shape = ProductShape(tokens, outputs, 256, torch.bfloat16)
    assert choose_product(StoredForm.FLOAT8_ROWS, shape, features=FNUZ, round_activations=fast) is expected


def test_tokens_are_rounded_to_the_weights_own_kind_of_codes() -> None:
    codes, scale = quantize_tokens(torch.tensor([[480.0, -2.0], [0.0, 0.0]]), dtype=torch.float8_e4m3fnuz)
    assert codes.dtype == torch.float8_e4m3fnuz
    assert scale.tolist() == [[2.0], [1.0]]
    assert codes.float().tolist() == [[240.0, -1.0], [0.0, 0.0]]


@pytest.mark.parametrize("features", [FNUZ, DeviceFeatures((9, 0))])
def test_codes_of_another_kind_than_the_devices_go_through_strips(features: DeviceFeatures) -> None:
    stored = quantized(scheme_by_name("fp8_per_channel"))
    if not features.fnuz:
        stored = process(stored, (Step.FNUZ,))
    weight, scale = stored["weight"], stored["weight_scale"]
    wide = weight.float() * scale.unsqueeze(1)
    x = torch.randn(4, COLUMNS, generator=torch.Generator().manual_seed(1))
    products = OnDevice(features, round_activations=True)
    found = products.float8_rows(x, weight, scale, None, widen=lambda start, stop: wide[start:stop])
    torch.testing.assert_close(found, x @ wide.t(), rtol=1e-4, atol=1e-4)

"""Packed copies: which weights have one, what they take, and that their product is the one that FBGEMM describes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quant.cpu_features import CpuFeatures
from quant.dtypes import DType, to_torch
from quant.kernels import KernelMode, Kernels
from quant.packed import PackedLinear, pack, packed_nbytes
from quant.registry import scheme_by_name, scheme_names
from streaming.panel_pool import PanelPool

INT8 = scheme_by_name("int8_per_channel")


@pytest.fixture
def kernels() -> Kernels:
    return Kernels.detect(mode=KernelMode.FAST)


@pytest.fixture
def three_threads() -> Iterator[Kernels]:
    pool = PanelPool(3)
    yield Kernels.detect(mode=KernelMode.FAST, run=pool)
    pool.close()


def _stored(rows: int, columns: int, name: str = "int8_per_channel") -> dict[str, torch.Tensor]:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).mul_(0.05)
    scheme = scheme_by_name(name)
    specs = scheme.storage((rows,), columns, wide=DType.F32)
    stored = {key: torch.empty(spec.shape, dtype=to_torch(spec.dtype)) for key, spec in specs.items()}
    scheme.quantize_into(weight, stored)
    return stored


def _packed(stored: dict[str, torch.Tensor], kernels: Kernels) -> PackedLinear:
    (found,) = pack([(INT8, stored)], kernels=kernels)
    assert found is not None
    return found


def _literal(x: torch.Tensor, stored: dict[str, torch.Tensor], *, levels: int) -> torch.Tensor:
    """x [I] rounded to one of levels + 1 numbers from its smallest to its largest, zero among them; then exact."""
    low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
    step = (high - low) / levels
    zero = round(-low / step)
    codes = (x.double() / step).round().add(zero).clamp(0, levels).sub(zero)
    return stored["weight"].double() @ codes * step * stored["weight_scale"].double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (101, 100), (1100, 1008)])
@pytest.mark.parametrize("vnni", [False, True])
def test_the_product_is_that_of_rounded_activations(vnni: bool, rows: int, columns: int, dtype: torch.dtype) -> None:
    detected = CpuFeatures.detect()
    if vnni and not detected.vnni:
        pytest.skip("this CPU's int8 sums would overflow with activations of 8 bits")
    kernels = Kernels(KernelMode.FAST, CpuFeatures(vnni=vnni))
    stored = _stored(rows, columns)
    x = torch.randn(1, 1, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.randn(rows, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = _packed(stored, kernels).linear(x, bias)
    assert found is not None
    expected = _literal(x.flatten().float(), stored, levels=255 if vnni else 127) + bias.double()
    assert (found.shape, found.dtype) == ((1, 1, rows), dtype)
    # A number halfway between two steps may go to either, which moves a sum by one step of x times one code.
    step = float(x.float().amax().clamp(min=0) - x.float().amin().clamp(max=0)) / 127
    bound = 3 * step * 127 * stored["weight_scale"].double() + 2 ** {2: -8, 4: -20}[dtype.itemsize] * expected.abs()
    assert bool(((found.flatten().double() - expected).abs() <= bound).all())


def test_the_bits_do_not_depend_on_threads(kernels: Kernels, three_threads: Kernels) -> None:
    stored, other, x = _stored(1600, 1008), _stored(640, 1008), torch.randn(1, 1008)
    before, found = torch.get_num_threads(), []
    try:
        for maker in (kernels, three_threads):
            first, second = pack([(INT8, stored), (INT8, other)], kernels=maker)
            assert first is not None
            assert second is not None
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append((first.linear(x, None), second.linear(x, None)))
    finally:
        torch.set_num_threads(before)
    for pair in found:
        for tensor, expected in zip(pair, found[0], strict=True):
            assert tensor is not None
            assert expected is not None
            assert torch.equal(tensor, expected)


def test_only_one_finite_row_is_taken(kernels: Kernels) -> None:
    packed = _packed(_stored(8, 16), kernels)
    assert packed.linear(torch.ones(1, 16), None) is not None
    for wrong in (torch.ones(2, 16), torch.full((1, 16), torch.nan), torch.full((1, 16), torch.inf)):
        assert packed.linear(wrong, None) is None


def test_a_row_of_zeros(kernels: Kernels) -> None:
    found = _packed(_stored(40, 16), kernels).linear(torch.zeros(1, 16), None)
    assert found is not None
    assert not found.any()


@pytest.mark.parametrize("name", scheme_names())
def test_which_schemes_are_packed(name: str, kernels: Kernels) -> None:
    scheme = scheme_by_name(name)
    stored = {"weight": torch.ones(40, 16)} if name == "none" else _stored(40, 16, name)
    (packed,) = pack([(scheme, stored)], kernels=kernels)
    assert (packed is not None) == (name == "int8_per_channel")
    assert packed_nbytes(scheme, (24, 16), 16) == (0 if packed is None else packed.nbytes)


def test_what_packed_copies_take() -> None:
    # Columns padded to 640, 32 bytes a row beside them, and 64 KiB. (1.06 bytes a number were measured.)
    assert packed_nbytes(INT8, (1536, 1536), 576) == 3072 * (640 + 32) + 65536

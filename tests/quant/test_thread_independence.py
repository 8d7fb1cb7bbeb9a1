"""The same bits with any number of threads: layers are computed with one while others load, and with more afterwards.

A half precision result hides most differences of its float32 sums. So half of the numbers are the others once more
with the other sign, in another order: the sums are nothing but their own rounding, which shows in every bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
import torch

from quant.cpu_features import CpuFeatures
from quant.dtypes import DType, to_torch
from quant.kernels import KernelMode, Kernels
from quant.panel_bounds import panel_bounds
from quant.panels import InOrder, Panel, RunPanels
from quant.registry import scheme_by_name, scheme_names
from streaming.panel_pool import PanelPool

# Shapes and rows at which F.linear itself was seen to change bits between one thread and two, odd ones, and one that
# has several panels in every scheme.
SHAPES = [(101, 100), (300, 1001), (1600, 1008), (4096, 1008)]
ROWS = (1, 3, 8, 33)
DETECTED = CpuFeatures.detect()
# Every machine can take the way of those that have no bfloat16 products; the other way needs them.
FEATURES = [CpuFeatures(native_bf16=False), *([DETECTED] if DETECTED.native_bf16 else [])]


pytestmark = pytest.mark.usefixtures("same_threads_afterwards")


@pytest.fixture(scope="module")
def pools() -> Iterator[tuple[PanelPool, PanelPool]]:
    one, three = PanelPool(1), PanelPool(3)
    yield one, three
    one.close()
    three.close()


def _backwards(panels: Sequence[Panel]) -> None:
    InOrder()(panels[::-1])


def _mirrored(numbers: torch.Tensor, *, sign: int) -> torch.Tensor:
    """The left half of the columns and the same times `sign`, shuffled; where they are odd, one column of zeros."""
    half, columns = numbers.shape[1] // 2, numbers.shape[1]
    both = torch.cat((numbers[:, :half], sign * numbers[:, :half], numbers[:, 2 * half :] * 0), dim=1)
    return both[:, torch.randperm(columns, generator=torch.Generator().manual_seed(columns))].contiguous()


@pytest.fixture(scope="module")
def numbers() -> dict[tuple[int, int], torch.Tensor]:
    """Weights [out, in] by their shape, made once."""
    return {
        shape: _mirrored(torch.randn(*shape, generator=torch.Generator().manual_seed(3)), sign=-1) for shape in SHAPES
    }


def _stored(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    if name == "none":
        return {"weight": weight}
    scheme = scheme_by_name(name)
    specs = scheme.storage(weight.shape[:1], weight.shape[1], wide=DType.F32)
    stored = {key: torch.empty(spec.shape, dtype=to_torch(spec.dtype)) for key, spec in specs.items()}
    scheme.quantize_into(weight, stored)
    return stored


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow), torch.float32])
@pytest.mark.parametrize("name", scheme_names())
def test_bits_do_not_depend_on_threads(
    name: str, dtype: torch.dtype, numbers: dict[tuple[int, int], torch.Tensor], pools: tuple[PanelPool, PanelPool]
) -> None:
    scheme = scheme_by_name(name)
    for shape, weight in numbers.items():
        stored = _stored(name, weight.to(dtype))
        for rows, mode, features in product(ROWS, (KernelMode.DEFAULT, KernelMode.EXACT), FEATURES):
            x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows))
            x = _mirrored(x, sign=1).to(dtype)
            found = {}
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                kernels = Kernels(mode, features)
                found[f"{threads} threads"] = scheme.linear(x, stored, shape[:1], None, kernels=kernels)
                assert torch.get_num_threads() == threads
            runs: dict[str, RunPanels] = {"backwards": _backwards, "pool of 1": pools[0], "pool of 3": pools[1]}
            for kind, run in runs.items():
                found[kind] = scheme.linear(x, stored, shape[:1], None, kernels=Kernels(mode, features, run))
            for kind, other in found.items():
                assert torch.equal(other, found["1 threads"]), (shape, rows, mode, features, kind)


@pytest.mark.parametrize("name", [name for name in scheme_names() if name != "none"])
def test_stored_numbers_do_not_depend_on_threads(name: str) -> None:
    scheme, found = scheme_by_name(name), []
    weight = torch.randn(301, 1001, generator=torch.Generator().manual_seed(4)).bfloat16()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        specs = scheme.storage((301,), 1001, wide=DType.BF16)
        stored = {key: torch.empty(spec.shape, dtype=to_torch(spec.dtype)) for key, spec in specs.items()}
        scheme.quantize_into(weight, stored)
        found.append(stored)
    for other in found[1:]:
        for key, tensor in found[0].items():
            assert torch.equal(tensor.float(), other[key].float()), key


@pytest.mark.parametrize("multiple", [32, 128])
@pytest.mark.parametrize(("rows", "row_nbytes"), [(1, 1), (127, 4), (576, 1152), (3072, 1152), (8192, 8192), (1000, 1)])
def test_panels_cover_every_row_once(rows: int, row_nbytes: int, multiple: int) -> None:
    bounds = panel_bounds(rows, row_nbytes, multiple=multiple)
    assert [row for start, stop in bounds for row in range(start, stop)] == list(range(rows))
    assert all(start % multiple == 0 for start, _ in bounds)
    assert len(bounds) <= 16

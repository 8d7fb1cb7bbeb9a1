"""A weight in several places: the same products to the bit."""

from __future__ import annotations

import pytest
import torch

from quant.cpu_features import CpuFeatures
from quant.kernels import KernelMode, Kernels
from quant.row_parts import RowParts

HEIGHTS = (96, 1, 700, 223)


def apart(weight: torch.Tensor, heights: tuple[int, ...] = HEIGHTS) -> RowParts:
    """Each part at an address of its own, which is as far from an aligned one as a file's header leaves it."""
    parts = []
    for part in weight.split(heights):
        size = weight.element_size()
        memory = torch.empty(part.numel() * size + 64 + size, dtype=torch.uint8)
        start = -memory.data_ptr() % 64 + size
        parts.append(memory[start : start + part.numel() * size].view(weight.dtype).view(part.shape).copy_(part))
    return RowParts(parts)


@pytest.mark.parametrize("mode", list(KernelMode))
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 5, 17, 130])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_has_the_bits_of_one_with_the_whole_weight(
    mode: KernelMode, native: bool, rows: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(sum(HEIGHTS), 328, generator=generator).to(dtype)
    x = torch.randn(rows, 328, generator=generator).to(dtype)
    bias = torch.randn(sum(HEIGHTS), generator=generator).to(dtype)
    kernels = Kernels(mode, CpuFeatures(native_bf16=native))
    for one in (None, bias):
        assert torch.equal(kernels.wide(x, apart(weight), one), kernels.wide(x, weight, one))
    wide = x.float()
    assert torch.equal(kernels.wide(wide, apart(weight), None), kernels.wide(wide, weight, None))


@pytest.mark.parametrize(
    ("heights", "columns"),
    [
        ((64, 32, 32), 64), ((33, 33), 96), ((512, 128, 128), 16), ((2048, 1024, 40), 96), ((256, 256), 256),
        ((512, 128, 128), 512), ((700, 300), 328), ((1024, 256, 256), 1000), ((33, 2561), 2560),
    ],
)  # fmt: skip
@pytest.mark.parametrize("threads", [1, 2])
def test_a_single_row_is_summed_in_the_same_order(heights: tuple[int, ...], columns: int, threads: int) -> None:
    """Numbers that cancel: another order of the sums shows."""
    generator, before = torch.Generator().manual_seed(columns), torch.get_num_threads()
    weight = torch.randn(sum(heights), columns, generator=generator)
    weight *= torch.randn(weight.shape, generator=generator).mul_(3).exp_()
    order = torch.randperm(columns, generator=generator)
    half = columns // 2
    weight[:, order[half : 2 * half]] = -weight[:, order[:half]]
    x, weight = torch.ones(1, columns, dtype=torch.bfloat16), weight.bfloat16()
    torch.set_num_threads(threads)
    try:
        kernels = Kernels()
        parts = apart(weight, heights)
        assert torch.equal(kernels.wide(x, parts, None), kernels.wide(x, weight, None))
    finally:
        torch.set_num_threads(before)


def test_any_rows_of_it() -> None:
    weight = torch.arange(sum(HEIGHTS) * 3, dtype=torch.float32).view(-1, 3)
    parts = apart(weight)
    assert parts.shape == weight.shape
    for start in (0, 1, 95, 96, 97, 500):
        for stop in (start, start + 1, start + 300, 1020):
            assert torch.equal(parts[start:stop], weight[start:stop])
    assert parts[100:700].data_ptr() == parts.parts[2][3:].data_ptr()  # in one place: not copied


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ([], "not none"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], r"not \[2, 3\] torch.float32, \[2, 4\] torch.float32"),
        ([torch.zeros(2, 3), torch.zeros(2, 3).half()], r"not \[2, 3\] torch.float32, \[2, 3\] torch.float16"),
    ],
)
def test_parts_that_make_no_weight(parts: list[torch.Tensor], found: str) -> None:
    with pytest.raises(ValueError, match=f"one width and dtype, {found}"):
        RowParts(parts)

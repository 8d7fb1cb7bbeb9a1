"""The same bits with any number of threads: layers are computed with one while others load, and with more afterwards.

A bfloat16 result hides most differences of its float32 sums, so every case is repeated on several inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quant.dtypes import DType, to_torch
from quant.kernels import KernelMode, Kernels
from quant.registry import scheme_by_name, scheme_names

# Shapes and rows at which F.linear itself was seen to change bits between one thread and two, and odd ones.
SHAPES = [(101, 100), (640, 576), (576, 1536), (300, 1001)]
ROWS = (1, 8, 32, 300)


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", scheme_names())
@pytest.mark.parametrize("mode", [KernelMode.DEFAULT, KernelMode.EXACT])
def test_bits_do_not_depend_on_threads(mode: KernelMode, name: str, dtype: torch.dtype) -> None:
    scheme, kernels = scheme_by_name(name), Kernels.detect(mode=mode)
    generator = torch.Generator().manual_seed(3)
    for rows_out, columns in SHAPES:
        weight = torch.randn(rows_out, columns, generator=generator).to(dtype)
        specs = scheme.storage((rows_out,), columns, wide=DType.F32)
        stored = {key: torch.empty(spec.shape, dtype=to_torch(spec.dtype)) for key, spec in specs.items()}
        scheme.quantize_into(weight, stored)
        if name == "none":
            stored = {"weight": weight}
        for rows in ROWS:
            x = torch.randn(rows, columns, generator=generator).to(dtype)
            found = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(scheme.linear(x, stored, (rows_out,), None, kernels=kernels))
                assert torch.get_num_threads() == threads
            assert torch.equal(found[0], found[1]), (rows_out, columns, rows)
            assert torch.equal(found[0], found[2]), (rows_out, columns, rows)


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

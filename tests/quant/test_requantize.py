"""A weight in one stored form is brought into another as if it were wide in between, though little of it ever is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quant import requantize as module
from quant.dtypes import DType, to_torch
from quant.float8 import Fp8PerBlock, Fp8PerChannel, Fp8PerTensor
from quant.microscaling import MxFp8
from quant.registry import scheme_by_name
from quant.requantize import requantize
from quant.scheme import Scheme
from tests.quant.quantized import quantized

TOTAL, COLUMNS = 300, 70
SOURCES = [Fp8PerTensor(), Fp8PerChannel(), Fp8PerBlock(), MxFp8()]


@pytest.mark.parametrize("name", ["fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int4_per_group", "nvfp4"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
@pytest.mark.parametrize(("first", "rows"), [(0, 300), (37, 200), (299, 1)])
def test_a_section_comes_out_as_from_its_wide_rows_and_no_more_than_a_strip_is_float32(
    source: Scheme, name: str, first: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    dequantize = type(source).dequantize

    def recording(*args: Any, **how: Any) -> torch.Tensor:
        found: torch.Tensor = dequantize(*args, **how)
        held.append(found.shape[0])
        return found

    target, generator = scheme_by_name(name), torch.Generator().manual_seed(rows)
    stored = quantized(source, torch.randn(TOTAL, COLUMNS, generator=generator), (TOTAL,))
    wide = source.dequantize(stored, (TOTAL,), dtype=torch.bfloat16)[first : first + rows]
    expected = quantized(target, wide, (rows,))
    specs = target.storage((rows,), COLUMNS, wide=DType.BF16)
    out = {key: torch.zeros(spec.shape).to(to_torch(spec.dtype)) for key, spec in specs.items()}
    monkeypatch.setattr(module, "STRIP_NBYTES", 4 * COLUMNS * 50)
    monkeypatch.setattr(type(source), "dequantize", recording)
    requantize(
        source, stored, target, out, first=first, rows=rows, total=TOTAL, in_features=COLUMNS, dtype=torch.bfloat16
    )
    assert all(torch.equal(out[key].view(torch.uint8), expected[key].view(torch.uint8)) for key in specs)
    assert max(held) <= (128 if source.row_multiple == 128 else 50)

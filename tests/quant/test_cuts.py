"""Parts of stored weights: their scheme says their shapes, and their numbers are the whole's, to the bit."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from quant.cells import Cell, cells
from quant.cuts import cut_scheme, cut_stored
from quant.dtypes import DType, to_torch
from quant.errors import QuantError
from quant.float8 import Fp8PerBlock, Fp8PerChannel, Fp8PerTensor
from quant.int4 import ORDER, IntPerGroup
from quant.int8 import Int8PerChannel
from quant.microscaling import MxFp4, MxFp8, NvFp4
from quant.nf4 import Nf4
from quant.scheme import Scheme
from quant.wide import Wide

SCHEMES: tuple[Scheme, ...] = (
    Wide(), Fp8PerTensor(), Fp8PerChannel(), Fp8PerBlock(), Fp8PerBlock(block=(12, 20)), Fp8PerBlock(block=(1, 16)),
    Int8PerChannel(), IntPerGroup(), IntPerGroup(group_size=64, symmetric=False), IntPerGroup(group_size=0),
    IntPerGroup(bits=8, group_size=20, symmetric=False), IntPerGroup(ordered=True, symmetric=False),
    IntPerGroup(bits=8, ordered=True, group_size=16), MxFp8(), MxFp4(), NvFp4(), NvFp4(divides=True),
    Nf4("nf4", 64, 1), Nf4("fp4", 64, 4), Nf4("nf4", 32, 2),
)  # fmt: skip
ROWS, COLUMNS = 300, 240
RUNS = ((0, 300), (0, 100), (100, 300), (128, 256), (7, 13), (299, 300), (150, 150))


@pytest.fixture(autouse=True)
def one_thread(same_threads_afterwards: None) -> None:
    """Small tensors, many operations: threads would mostly wait for each other."""
    torch.set_num_threads(1)


def columns_of(scheme: Scheme) -> int:
    """One row's numbers: whole blocks where nf4's end with a row, else not, so that they reach over it."""
    return {1: 256, 2: 240, 4: 240}[scheme.span] if isinstance(scheme, Nf4) else COLUMNS


def stored_at_random(scheme: Scheme, rows: int, columns: int, *, seed: int) -> dict[str, torch.Tensor]:
    """Any bytes that are no NaN: codes and scales that no quantization would make, too."""
    stored: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    for name, spec in scheme.storage((rows,), columns, wide=DType.BF16).items():
        if name == ORDER:
            groups = stored["weight_scale"].shape[1]
            stored[name] = torch.randint(groups, spec.shape, dtype=torch.int32, generator=generator)
        elif spec.dtype in (DType.F32, DType.BF16):
            stored[name] = torch.rand(spec.shape, generator=generator).add_(0.1).to(to_torch(spec.dtype))
        else:
            codes = torch.randint(120, (math.prod(spec.shape),), dtype=torch.uint8, generator=generator)
            stored[name] = codes.view(to_torch(spec.dtype)).view(spec.shape)
    return stored


def check_part(
    scheme: Scheme, stored: dict[str, torch.Tensor], rows: tuple[int, int], columns: tuple[int, int] | None
) -> None:
    total, in_features = ROWS, columns_of(scheme)
    first, stop = columns or (0, in_features)
    part_scheme = cut_scheme(scheme, row_offsets=(rows[0],), columns=columns, in_features=in_features)
    part = cut_stored(
        scheme, stored, part_scheme, rows=rows, columns=columns, total_rows=total, in_features=in_features
    )
    specs = part_scheme.storage((rows[1] - rows[0],), stop - first, wide=DType.BF16)
    assert {name: (tuple(one.shape), one.dtype) for name, one in part.items()} == {
        name: (spec.shape, to_torch(spec.dtype)) for name, spec in specs.items()
    }
    whole = scheme.dequantize(stored, (total,), dtype=torch.float32, in_features=in_features)
    own = part_scheme.dequantize(part, (rows[1] - rows[0],), dtype=torch.float32, in_features=stop - first)
    assert torch.equal(own, whole[rows[0] : rows[1], first:stop])


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: repr(scheme))
class TestEveryScheme:
    """Of any stored bytes."""

    @pytest.mark.parametrize("columns", [None, (0, 240), (120, 240), (64, 128), (60, 180), (34, 46)])
    def test_a_part_has_the_numbers_of_the_whole(self, scheme: Scheme, columns: tuple[int, int] | None) -> None:
        stored = stored_at_random(scheme, ROWS, columns_of(scheme), seed=7)
        for rows in RUNS:
            check_part(scheme, stored, rows, columns)

    def test_parts_of_a_part_are_kept_as_parts_of_the_whole(self, scheme: Scheme) -> None:
        """A second cut, as of a part that was saved."""
        stored = stored_at_random(scheme, ROWS, columns_of(scheme), seed=8)
        inner = cut_scheme(scheme, row_offsets=(100,), columns=(40, 200), in_features=columns_of(scheme))
        part = cut_stored(
            scheme, stored, inner, rows=(100, 300), columns=(40, 200), total_rows=ROWS, in_features=columns_of(scheme)
        )
        whole = scheme.dequantize(stored, (ROWS,), dtype=torch.float32, in_features=columns_of(scheme))
        for first, stop in pairwise(range(0, 161, 20)):
            own = cut_scheme(inner, row_offsets=(30,), columns=(first, stop), in_features=160)
            found = cut_stored(inner, part, own, rows=(30, 77), columns=(first, stop), total_rows=200, in_features=160)
            numbers = own.dequantize(found, (47,), dtype=torch.float32, in_features=stop - first)
            assert torch.equal(numbers, whole[130:177, 40 + first : 40 + stop])

    def test_every_stored_tensor_has_a_cell(self, scheme: Scheme) -> None:
        specs = scheme.storage((ROWS,), columns_of(scheme), wide=DType.BF16)
        found = cells(scheme, columns_of(scheme))
        assert list(found) == list(specs)
        for name, cell in found.items():
            assert cell.rows == 0 or specs[name].shape[0] == -(-ROWS // cell.rows)
            assert cell.columns == 0 or specs[name].shape[1] == -(-columns_of(scheme) // cell.columns)


def test_an_odd_last_column_is_the_last_of_the_last_part() -> None:
    for scheme in (IntPerGroup(), IntPerGroup(symmetric=False), MxFp4(), NvFp4(), MxFp8(), Int8PerChannel()):
        generator = torch.Generator().manual_seed(3)
        weight = torch.randn(5, 75, generator=generator)
        stored = {
            name: torch.empty(spec.shape, dtype=to_torch(spec.dtype))
            for name, spec in scheme.storage((5,), 75, wide=DType.F32).items()
        }
        scheme.quantize_into(weight, stored)
        whole = scheme.dequantize(stored, (5,), dtype=torch.float32, in_features=75)
        own = cut_scheme(scheme, row_offsets=(2,), columns=(40, 75), in_features=75)
        part = cut_stored(scheme, stored, own, rows=(2, 5), columns=(40, 75), total_rows=5, in_features=75)
        assert torch.equal(own.dequantize(part, (3,), dtype=torch.float32, in_features=35), whole[2:, 40:])


def test_cells_are_those_of_the_kept_forms() -> None:
    assert cells(IntPerGroup(symmetric=False), 64) == {
        "weight": Cell(1, 2), "weight_scale": Cell(1, 32), "weight_zero_point": Cell(1, 32)
    }  # fmt: skip
    assert cells(IntPerGroup(bits=8, ordered=True), 64)[ORDER] == Cell(0, 1)
    assert cells(Fp8PerBlock(), 256)["weight_scale"] == Cell(128, 128)
    assert cells(NvFp4(), 64)["weight_global_scale"] == cells(Fp8PerTensor(), 64)["weight_scale"] == Cell(0, 0)


def test_blocks_shrink_only_where_a_cut_goes_through_them() -> None:
    def of(scheme: Scheme, rows: tuple[int, ...], columns: tuple[int, int] | None) -> Scheme:
        return cut_scheme(scheme, row_offsets=rows, columns=columns, in_features=512)

    assert of(Fp8PerBlock(), (128, 256), (0, 200)) == Fp8PerBlock()
    assert of(Fp8PerBlock(), (128, 192), (128, 512)) == Fp8PerBlock(block=(64, 128))
    assert of(Fp8PerBlock(), (0,), (96, 512)) == Fp8PerBlock(block=(128, 32))
    assert of(MxFp4(), (7,), (48, 128)) == MxFp4(block=16)
    assert of(MxFp8(), (0,), (33, 64)) == MxFp8()  # within one block
    assert of(NvFp4(), (1,), (16, 32)) == NvFp4()
    assert of(IntPerGroup(group_size=64), (), (8, 512)) == IntPerGroup(group_size=8)
    assert of(IntPerGroup(group_size=0), (3,), (8, 16)) == IntPerGroup(group_size=0)
    assert of(IntPerGroup(ordered=True), (0,), (8, 16)) == IntPerGroup(ordered=True, groups=16)
    assert of(Nf4("nf4", 64, 1), (5,), (96, 192)) == Nf4("nf4", 32, 1)


def test_whole_cells_are_views_and_hold_no_memory_of_their_own() -> None:
    stored = stored_at_random(Fp8PerBlock(), ROWS, COLUMNS, seed=1)
    part = cut_stored(
        Fp8PerBlock(), stored, Fp8PerBlock(), rows=(128, 300), columns=(128, 240), total_rows=300, in_features=240
    )
    assert part["weight"].data_ptr() == stored["weight"][128:, 128:].data_ptr()
    assert part["weight_scale"].data_ptr() == stored["weight_scale"][1:, 1:].data_ptr()


@pytest.mark.parametrize("scheme", [IntPerGroup(), MxFp4(), NvFp4(), Nf4("nf4", 64, 1)])
@pytest.mark.parametrize("columns", [(33, 64), (32, 65)])
def test_a_cut_within_a_byte_is_named(scheme: Scheme, columns: tuple[int, int]) -> None:
    with pytest.raises(QuantError, match=rf"columns {columns[0]} to {columns[1]} of 128 .* within a byte of 2 numbers"):
        cut_scheme(scheme, row_offsets=(0,), columns=columns, in_features=128)


def test_rows_that_there_are_not_are_named() -> None:
    stored = stored_at_random(MxFp8(), ROWS, COLUMNS, seed=1)
    with pytest.raises(QuantError, match="rows 200 to 301 of a weight that has 300"):
        cut_stored(MxFp8(), stored, MxFp8(), rows=(200, 301), columns=None, total_rows=300, in_features=240)


@pytest.mark.parametrize("scheme", [MxFp8(block=16), MxFp4(block=8), NvFp4(block=4)])
def test_smaller_blocks_are_kept_multiplied_and_not_made(scheme: Scheme) -> None:
    from quant.kernels import Kernels

    stored = stored_at_random(scheme, 24, 64, seed=5)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(6))
    expected = x @ scheme.dequantize(stored, (24,), dtype=torch.float32).T
    torch.testing.assert_close(scheme.linear(x, stored, (24,), None, kernels=Kernels()), expected, rtol=1e-5, atol=1e-3)
    with pytest.raises(QuantError, match="weights are quantized in blocks of"):
        scheme.quantize_into(torch.zeros(24, 64), stored)


def test_sizes_that_no_part_has_are_refused() -> None:
    for scheme in (MxFp8, MxFp4, NvFp4):
        with pytest.raises(QuantError, match="a block of 0 numbers"):
            scheme(block=0)
    with pytest.raises(QuantError, match="5 groups: their number is only kept beside an order of inputs"):
        IntPerGroup(groups=5)


def test_a_part_of_an_ordered_weight_is_only_kept() -> None:
    part = IntPerGroup(ordered=True, groups=16)
    with pytest.raises(QuantError, match="a part of a weight's groups is only kept"):
        part.quantize_into(torch.zeros(2, 8), stored_at_random(part, 2, 8, seed=1))

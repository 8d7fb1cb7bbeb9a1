"""Parts of a weight, quantized apart under maxima that were agreed on, are the parts of the whole, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch

from quant.cuts import cut_scheme, cut_stored
from quant.dtypes import DType, to_torch
from quant.errors import QuantError
from quant.float8 import Fp8PerBlock, Fp8PerChannel, Fp8PerTensor
from quant.int4 import IntPerGroup
from quant.int8 import Int8PerChannel
from quant.microscaling import MxFp4, MxFp8, NvFp4
from quant.scheme import Scheme
from quant.shared_scales import Scope, SectionCut, local_maxima, quantize_part, quantize_whole, runs, scope_of
from quant.wide import Wide

SCHEMES: tuple[Scheme, ...] = (
    Wide(), Fp8PerTensor(), Fp8PerChannel(), Fp8PerBlock(), Int8PerChannel(), IntPerGroup(),
    IntPerGroup(group_size=64, symmetric=False), IntPerGroup(group_size=0), IntPerGroup(group_size=0, symmetric=False),
    IntPerGroup(bits=8, symmetric=False), IntPerGroup(bits=8, group_size=3, symmetric=False),
    IntPerGroup(scale_dtype=DType.F32), MxFp8(), MxFp4(), NvFp4(), NvFp4(divides=True),
)  # fmt: skip
PERCENTILES: tuple[Scheme, ...] = (
    Fp8PerTensor(99.0), Fp8PerChannel(90.0), Fp8PerBlock(99.5), Int8PerChannel(95.0), IntPerGroup(ordered=True),
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread(same_threads_afterwards: None) -> None:
    """Small tensors, many operations: threads would mostly wait for each other."""
    torch.set_num_threads(1)


def weight_of(rows: int, columns: int, dtype: torch.dtype, *, seed: int) -> torch.Tensor:
    """Numbers of many sizes, with groups, rows and runs of rows that are all zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.exp2(torch.randint(-6, 7, (rows, columns), generator=generator).float())
    weight[rows // 3], weight[:, columns // 2 : columns // 2 + 70] = 0, 0
    weight[:, :5] = weight[:, :5].abs()  # nothing below zero on one side of a cut
    return weight.to(dtype)


def empty(scheme: Scheme, rows: int, columns: int) -> dict[str, torch.Tensor]:
    specs = scheme.storage((rows,), columns, wide=DType.F32)
    return {
        name: torch.full((spec.nbytes,), 77, dtype=torch.uint8).view(to_torch(spec.dtype)).view(spec.shape)
        for name, spec in specs.items()
    }


def cuts_of(shape: tuple[int, int], rows: Sequence[int], columns: Sequence[int]) -> Iterator[SectionCut]:
    """The cut as each of its ranks sees it, between these edges."""
    for first in pairwise((0, *rows, shape[0])):
        for second in pairwise((0, *columns, shape[1])):
            yield SectionCut(*shape, first, second, tuple(rows), tuple(columns))


def quantized_apart(scheme: Scheme, weight: torch.Tensor, cuts: Sequence[SectionCut], *, most: int) -> Iterator[
    tuple[SectionCut, Scheme, dict[str, torch.Tensor]]
]:  # fmt: skip
    """What each rank keeps: its part quantized in runs of rows, under maxima that are joined from runs, too."""
    scope = scope_of(scheme, cuts[0])
    parts = [weight[slice(*cut.rows), slice(*cut.columns)].clone() for cut in cuts]
    agreed = None
    if scope is Scope.MAXIMA:
        found = [
            local_maxima(scheme, part[first : first + 41], cut, first=first)
            for cut, part in zip(cuts, parts, strict=True)
            for first in range(0, max(1, part.shape[0]), 41)
        ]
        agreed = torch.stack(found).amax(0)
    for cut, part in zip(cuts, parts, strict=True):
        own = cut_scheme(scheme, row_offsets=(cut.rows[0],), columns=cut.columns, in_features=cut.in_features)
        out = empty(own, *part.shape)
        if scope is Scope.WHOLE:
            quantize_whole(scheme, own, weight, cut, out)
        for first, stop in runs(scheme, cut, most=most) if scope is not Scope.WHOLE else ():
            views = cut_stored(
                own, out, own, rows=(first, stop), columns=None, total_rows=part.shape[0], in_features=part.shape[1]
            )
            quantize_part(scheme, own, part[first:stop], agreed, cut, views, first=first)
        yield cut, own, out


def check_parts(scheme: Scheme, weight: torch.Tensor, cuts: Sequence[SectionCut], *, most: int = 1 << 20) -> None:
    whole = empty(scheme, *weight.shape)
    scheme.quantize_into(weight, whole)
    for cut, own, found in quantized_apart(scheme, weight, cuts, most=most):
        expected = cut_stored(
            scheme, whole, own, rows=cut.rows, columns=cut.columns, total_rows=cut.total_rows,
            in_features=cut.in_features,
        )  # fmt: skip
        for name, tensor in expected.items():
            same = torch.equal(same_nan(found[name]), same_nan(tensor))
            assert same, f"{name} of rows {cut.rows} and columns {cut.columns}"


def same_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, all NaN being the same."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        tensor = tensor.nan_to_num(nan=12345.0, posinf=torch.inf, neginf=-torch.inf)
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("scheme", SCHEMES + PERCENTILES, ids=repr)
class TestEveryScheme:
    """Cut by rows, by columns, in few and in many parts."""

    @pytest.mark.parametrize("edges", [(128,), (100, 101, 300), range(32, 256, 32), (0, 90, 260)])
    def test_rows(self, scheme: Scheme, edges: Sequence[int]) -> None:
        weight = weight_of(310, 135, torch.bfloat16, seed=len(edges))
        check_parts(scheme, weight, list(cuts_of((310, 135), tuple(edges), ())))

    @pytest.mark.parametrize("edges", [(128,), (40, 42, 174), range(32, 256, 32), (10, 190, 250)])
    def test_columns(self, scheme: Scheme, edges: Sequence[int]) -> None:
        weight = weight_of(140, 257, torch.bfloat16, seed=len(edges))
        check_parts(scheme, weight, list(cuts_of((140, 257), (), tuple(edges))))

    def test_both_in_runs_of_rows(self, scheme: Scheme) -> None:
        weight = weight_of(300, 140, torch.float32, seed=9)
        check_parts(scheme, weight, list(cuts_of((300, 140), (150, 280), (70,))), most=37)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.float8_e4m3fn])
    def test_other_wide_numbers(self, scheme: Scheme, dtype: torch.dtype) -> None:
        weight = weight_of(70, 70, dtype, seed=4)
        check_parts(scheme, weight, list(cuts_of((70, 70), (35,), ())), most=20)
        check_parts(scheme, weight, list(cuts_of((70, 70), (), (34,))), most=20)

    def test_zeros(self, scheme: Scheme) -> None:
        check_parts(scheme, torch.zeros(40, 70), list(cuts_of((40, 70), (), (34,))))

    def test_a_part_without_rows_has_the_scales_of_the_section(self, scheme: Scheme) -> None:
        check_parts(scheme, weight_of(64, 40, torch.bfloat16, seed=2), list(cuts_of((64, 40), (32, 64), ())))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if scheme.name != "none"], ids=repr)
def test_scales_tell_of_what_is_not_finite_on_another_rank(scheme: Scheme, wrong: float) -> None:
    weight = weight_of(140, 140, torch.float32, seed=5)
    weight[20, 3] = wrong
    whole = empty(scheme, 140, 140)
    scheme.quantize_into(weight, whole)
    for rows, columns in (((70,), ()), ((), (70,))):
        cuts = list(cuts_of((140, 140), rows, columns))
        for cut, own, found in quantized_apart(scheme, weight, cuts, most=1 << 20):
            expected = cut_stored(
                scheme, whole, own, rows=cut.rows, columns=cut.columns, total_rows=140, in_features=140
            )
            for name in expected.keys() - {"weight"}:
                assert torch.equal(same_nan(found[name]), same_nan(expected[name])), name


def test_one_missing_number_of_a_group_is_its_largest_or_its_smallest() -> None:
    scheme = IntPerGroup(bits=8, group_size=4, symmetric=False)
    for number in (9.0, -9.0, 0.5, 0.0, torch.nan):
        weight = torch.tensor([[1.0, -2.0, 3.0, number], [-1.0, -2.0, -3.0, number], [1.0, 2.0, 3.0, number]])
        whole = empty(scheme, 3, 4)
        scheme.quantize_into(weight, whole)
        *_, (_, _, found) = quantized_apart(scheme, weight, list(cuts_of((3, 4), (), (3,)))[::-1], most=9)
        assert torch.equal(same_nan(found["weight_scale"]), same_nan(whole["weight_scale"]))
        assert torch.equal(found["weight_zero_point"], whole["weight_zero_point"])


def test_blocks_that_are_smaller_for_another_section_are_made_as_large_ones() -> None:
    """A part's scheme is one for all its sections: here one is cut within a block, and this one between blocks."""
    weight, own = weight_of(384, 150, torch.bfloat16, seed=6), Fp8PerBlock(block=(32, 128))
    whole, out = empty(Fp8PerBlock(), 384, 150), empty(own, 256, 150)
    Fp8PerBlock().quantize_into(weight, whole)
    cut = SectionCut(384, 150, (128, 384), (0, 150), (128,), ())
    assert scope_of(Fp8PerBlock(), cut) is Scope.OWN
    quantize_part(Fp8PerBlock(), own, weight[128:], None, cut, out)
    expected = cut_stored(
        Fp8PerBlock(), whole, own, rows=(128, 384), columns=None, total_rows=384, in_features=150
    )  # fmt: skip
    assert all(torch.equal(same_nan(out[name]), same_nan(expected[name])) for name in expected)
    assert torch.equal(out["weight_scale"][3], whole["weight_scale"][1])


class TestScopes:
    """What a cut goes through."""

    def scope(self, scheme: Scheme, *, rows: tuple[int, ...] = (), columns: tuple[int, ...] = ()) -> Scope:
        found = {scope_of(scheme, cut) for cut in cuts_of((512, 512), rows, columns)}
        assert len(found) == 1, "the ranks do not agree"
        return found.pop()

    def test_nothing_is_shared_where_no_cell_is_cut(self) -> None:
        assert self.scope(Wide(), rows=(3,), columns=(5,)) is Scope.OWN
        assert self.scope(Int8PerChannel(50.0), rows=(3, 77)) is Scope.OWN
        assert self.scope(Fp8PerBlock(), rows=(128, 384), columns=(256,)) is Scope.OWN
        assert self.scope(IntPerGroup(), rows=(3,), columns=(32, 480)) is Scope.OWN
        assert self.scope(Fp8PerTensor()) is self.scope(NvFp4()) is Scope.OWN

    def test_maxima_are_agreed_where_one_is(self) -> None:
        assert self.scope(Fp8PerTensor(), rows=(256,)) is Scope.MAXIMA
        assert self.scope(Int8PerChannel(), columns=(256,)) is Scope.MAXIMA
        assert self.scope(Fp8PerBlock(), rows=(128, 192)) is Scope.MAXIMA
        assert self.scope(NvFp4(), columns=(256,)) is Scope.MAXIMA
        assert self.scope(MxFp4(), columns=(256, 258)) is Scope.MAXIMA

    def test_percentiles_and_odd_groups_of_nibbles_need_all_numbers(self) -> None:
        assert self.scope(Int8PerChannel(99.0), columns=(256,)) is Scope.WHOLE
        assert self.scope(Fp8PerBlock(99.0), rows=(100,)) is Scope.WHOLE
        assert self.scope(IntPerGroup(group_size=5), columns=(256,)) is Scope.WHOLE

    def test_maxima_are_as_few_as_the_cells_that_are_cut(self) -> None:
        sizes: dict[Scheme, int] = {
            Fp8PerTensor(): 1, Int8PerChannel(): 512, IntPerGroup(): 512, IntPerGroup(symmetric=False): 1024,
            NvFp4(): 513, Fp8PerBlock(): 4,
        }  # fmt: skip
        for scheme, size in sizes.items():
            cut = SectionCut(512, 512, (0, 512), (0, 200), (), (200,))
            assert local_maxima(scheme, torch.ones(512, 200), cut).shape == (size,), scheme


def test_runs_of_rows_hold_whole_blocks_of_the_section() -> None:
    cut = SectionCut(1000, 64, (200, 900), (0, 64), (200, 900), ())
    assert runs(Fp8PerBlock(), cut, most=300) == [(0, 184), (184, 440), (440, 696), (696, 700)]
    assert runs(Int8PerChannel(), cut, most=300) == [(0, 300), (300, 600), (600, 700)]
    assert runs(NvFp4(), cut, most=300) == [(0, 300), (300, 600), (600, 700)]
    assert runs(Fp8PerTensor(99.0), cut, most=300) == [(0, 700)]


def test_a_part_beyond_its_edges_is_refused() -> None:
    with pytest.raises(QuantError, match="rows 0 to 30 of 64, cut at 32"):
        SectionCut(64, 64, (0, 30), (0, 64), (32,))


def test_a_part_is_not_quantized_without_the_maxima_that_it_needs() -> None:
    cut = SectionCut(64, 64, (0, 32), (0, 64), (32,))
    out = empty(Fp8PerTensor(), 32, 64)
    with pytest.raises(QuantError, match="scope is 'maxima'"):
        quantize_part(Fp8PerTensor(), Fp8PerTensor(), torch.ones(32, 64), None, cut, out)

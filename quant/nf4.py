"""Weights of 4-bit codes for 16 fixed numbers, times a float32 scale for each block: bitsandbytes' nf4 and fp4.

A block is a run of numbers of the whole section, row after row (64 of them, usually): it may reach over the end of a
row. Two codes a byte, the even column's in the *high* nibble. Scales are kept in rows: each has the blocks of `span`
rows of the weight, the fewest that are whole blocks, so that a weight is cut at a multiple of `span` rows.

nf4: the numbers are quantiles of the normal distribution, from "QLoRA" (Dettmers et al., 2023), appendix E. fp4: a
sign, two bits of exponent and one of mantissa, over 12; as bitsandbytes has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from quant.dtypes import DType
from quant.errors import QuantError
from quant.scheme import StoredSpec
from quant.sections import dequantize_by_section, linear_by_section, row_range, total_rows

if TYPE_CHECKING:
    import torch

    from quant.kernels import Kernels

_FP4 = tuple(number / 12 for number in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
NUMBERS: Mapping[str, tuple[float, ...]] = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": (*_FP4, *(-number if number else 0.0 for number in _FP4)),
}  # fmt: skip


@dataclass(frozen=True)
class Nf4:
    """{"weight": uint8 [O, I / 2], "weight_scale": float32 [sections' ceil(rows / span), span * I / block]}.

    `numbers`: "nf4" or "fp4"; `block`: numbers that share a scale. Only kept, where a checkpoint has it.
    """

    numbers: str
    block: int
    span: int = 1

    def __post_init__(self) -> None:
        if self.numbers not in NUMBERS or self.block < 1 or self.span < 1:
            raise QuantError(f"codes of {self.numbers!r} in blocks of {self.block} over {self.span} rows are not known")

    @classmethod
    def of(cls, numbers: str, *, block: int, in_features: int) -> Nf4:
        """The scheme of weights of so many columns, which must be even."""
        if in_features % 2:
            raise QuantError(f"{numbers} weights have an even number of columns, not {in_features}")
        return cls(numbers, block, block // gcd(block, in_features))

    @property
    def name(self) -> str:
        """What it is called."""
        return self.numbers

    @property
    def row_multiple(self) -> int:
        """Rows that are whole blocks."""
        return self.span

    def storage(self, sections: tuple[int, ...], in_features: int, *, wide: DType) -> dict[str, StoredSpec]:
        """Half a byte a number, one float32 a block. QuantError where blocks do not end with `span` rows."""
        if in_features % 2 or self.span * in_features % self.block:
            raise QuantError(f"{self.name}: {self.span} rows of {in_features} are not whole blocks of {self.block}")
        return {
            "weight": StoredSpec((total_rows(sections), in_features // 2), DType.U8),
            "weight_scale": StoredSpec((sum(self._spans(sections)), self.span * in_features // self.block), DType.F32),
        }

    def section_views(
        self, stored: Mapping[str, torch.Tensor], sections: tuple[int, ...], index: int
    ) -> dict[str, torch.Tensor]:
        """The section's rows, and its rows of scales."""
        return {
            "weight": stored["weight"][row_range(sections, index)],
            "weight_scale": stored["weight_scale"][row_range(self._spans(sections), index)],
        }

    def quantize_into(self, weight: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """QuantError: weights are not quantized so here."""
        raise QuantError(f"{self.name}: weights are kept so where a checkpoint has them, and not quantized so")

    def dequantize(
        self,
        stored: Mapping[str, torch.Tensor],
        sections: tuple[int, ...],
        *,
        dtype: torch.dtype,
        in_features: int | None = None,
    ) -> torch.Tensor:
        """number x scale, in float32, rounded once. `in_features` is even, and known from the codes."""
        from quant.nf4_strips import CodedBlocks

        def numbers(views: Mapping[str, torch.Tensor]) -> torch.Tensor:
            return CodedBlocks(views["weight"], views["weight_scale"], self).numbers(0, views["weight"].shape[0])

        return dequantize_by_section(self, stored, sections, dtype=dtype, numbers=numbers)

    def linear(
        self,
        x: torch.Tensor,
        stored: Mapping[str, torch.Tensor],
        sections: tuple[int, ...],
        bias: torch.Tensor | None,
        *,
        kernels: Kernels,
    ) -> torch.Tensor:
        """x [..., I] -> [..., O]; section by section where blocks reach over rows, since each begins one of its own."""
        from quant.nf4_strips import CodedBlocks

        def product(views: Mapping[str, torch.Tensor], part: torch.Tensor | None) -> torch.Tensor:
            return kernels.coded(x, CodedBlocks(views["weight"], views["weight_scale"], self), part)

        if self.span == 1:
            return product(stored, bias)
        return linear_by_section(self, stored, sections, bias, product=product)

    def _spans(self, sections: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-rows // self.span) for rows in sections)

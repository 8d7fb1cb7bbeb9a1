"""Integer weights in groups of columns: 4 bits (or 8) a number, a scale and, if asked for, a zero point a group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quant.dtypes import DType
from quant.errors import QuantError
from quant.scheme import StoredSpec
from quant.sections import dequantize_by_section, linear_by_section, row_views, total_rows

if TYPE_CHECKING:
    import torch

    from quant.kernels import Kernels

GROUP_SIZES = (32, 64, 128)  # that can be asked for by name
ORDER = "g_idx"  # the stored tensor that says which group each input is in


@dataclass(frozen=True)
class IntPerGroup:
    """{"weight": U8 [O, ceil(I/2)], or [O, I] with 8 bits; "weight_scale": [O, G]; where not symmetric
    "weight_zero_point": U8 [O, G]; where ordered "g_idx": I32 [sections, I], the group of each input of a section}.

    G is ceil(I / group_size): the last group may be short; group_size 0 is one group for the row. Codes are unsigned,
    number = (code - zero) * scale; symmetric: the zero is 8 (128 with 8 bits). A part of an ordered weight keeps the
    scales of all `groups` of the whole, however few its columns (quant.cuts); 0: as many as the columns make.
    """

    bits: int = 4
    group_size: int = 32
    symmetric: bool = True
    scale_dtype: DType = DType.BF16
    ordered: bool = False
    groups: int = 0

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.group_size < 0:
            raise QuantError(f"integers of {self.bits} bits in groups of {self.group_size}: bits are 4 or 8")
        if self.groups < 0 or (self.groups and not self.ordered):
            raise QuantError(f"{self.groups} groups: their number is only kept beside an order of inputs")

    @property
    def name(self) -> str:
        """The name on the command line, as far as it has one."""
        size = {32: "", 0: ":row"}.get(self.group_size, f":{self.group_size}")
        rest = f"{'' if self.symmetric else ':asym'}{':ordered' if self.ordered else ''}"
        return f"int{self.bits}_per_group{size}{rest}"

    @property
    def row_multiple(self) -> int:
        """1: each row has scales of its own; 0 where the order of inputs belongs to a whole section."""
        return 0 if self.ordered else 1

    @property
    def zero(self) -> int:
        """The code of 0.0 where the scheme is symmetric."""
        return 1 << (self.bits - 1)

    def with_suffixes(self, suffixes: tuple[str, ...]) -> IntPerGroup:
        """The scheme that these parts of a name ask for; QuantError for others."""
        found = self
        sizes = {str(size): size for size in GROUP_SIZES}
        for number, suffix in enumerate(suffixes):
            if number == 0 and suffix in sizes:
                found = replace(found, group_size=sizes[suffix])
            elif suffix == "asym" and found.symmetric:
                found = replace(found, symmetric=False)
            else:
                raise QuantError(
                    f"quantization {':'.join((self.name, *suffixes))!r}: {suffix!r} is not known there; it is "
                    f"{self.name}[:{'|'.join(sizes)}][:asym]"
                )
        return found

    def storage(self, sections: tuple[int, ...], in_features: int, *, wide: DType) -> dict[str, StoredSpec]:
        """Half a byte a number (one with 8 bits), and what each group has."""
        rows = total_rows(sections)
        groups = self.groups or -(-in_features // (self.group_size or max(1, in_features)))
        width = in_features if self.bits == 8 else -(-in_features // 2)
        found = {
            "weight": StoredSpec((rows, width), DType.U8),
            "weight_scale": StoredSpec((rows, groups), self.scale_dtype),
        }
        if not self.symmetric:
            found["weight_zero_point"] = StoredSpec((rows, groups), DType.U8)
        if self.ordered:
            found[ORDER] = StoredSpec((len(sections), in_features), DType.I32)
        return found

    def section_views(
        self, stored: Mapping[str, torch.Tensor], sections: tuple[int, ...], index: int
    ) -> dict[str, torch.Tensor]:
        """The section's rows, and its order of inputs."""
        rows = row_views(stored, sections, index)
        return rows | {ORDER: stored[ORDER][index : index + 1]} if ORDER in stored else rows

    def quantize_into(self, weight: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """A scale for each group; an order of inputs, where it is kept, is that of the columns."""
        from quant.int4_codec import encode

        if self.groups:
            raise QuantError(f"{self.name}: a part of a weight's groups is only kept, and not quantized by itself")
        encode(weight, out, bits=self.bits, group_size=self.group_size, symmetric=self.symmetric)
        if self.ordered:
            import torch

            columns = torch.arange(weight.shape[1], dtype=torch.int32, device=weight.device)
            out[ORDER].copy_(columns // (self.group_size or max(1, weight.shape[1])))

    def dequantize(
        self,
        stored: Mapping[str, torch.Tensor],
        sections: tuple[int, ...],
        *,
        dtype: torch.dtype,
        in_features: int | None = None,
    ) -> torch.Tensor:
        """(code - zero) x scale, in float32, rounded once.

        Nibbles do not tell whether the last one is a number: where `in_features` is not given it is taken for one, so
        an odd number of columns comes with one more, to be left out.
        """
        from quant.int4_codec import codes_of, decode

        def numbers(views: Mapping[str, torch.Tensor]) -> torch.Tensor:
            order = views.get(ORDER)
            columns = in_features if order is None else order.shape[1]
            codes = codes_of(views["weight"], columns, bits=self.bits)
            zero = views.get("weight_zero_point", self.zero)
            return decode(codes, views["weight_scale"], zero, self.group_size if order is None else order[0])

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
        """x [..., I] -> [..., O]; section by section where each has an order of its own."""
        from quant.int4_strips import IntGroups

        def product(views: Mapping[str, torch.Tensor], part: torch.Tensor | None) -> torch.Tensor:
            zero = views.get("weight_zero_point", self.zero)
            group = views[ORDER][0] if self.ordered else self.group_size
            return kernels.int4(x, IntGroups(views["weight"], views["weight_scale"], zero, group, self.bits), part)

        if not self.ordered:
            return product(stored, bias)
        return linear_by_section(self, stored, sections, bias, product=product)

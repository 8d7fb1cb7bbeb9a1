"""Scheme "none": the weight is kept as it came, in a dtype that a matmul can run in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.dtypes import DType
from quant.scheme import StoredSpec
from quant.sections import row_range, total_rows

if TYPE_CHECKING:
    import torch

    from quant.kernels import Kernels


@dataclass(frozen=True)
class Wide:
    """Wide weights: {"weight": [O, I]} in the dtype of the model, no scales."""

    @property
    def name(self) -> str:
        """ "none": nothing is quantized."""
        return "none"

    @property
    def row_multiple(self) -> int:
        """1: each row stands alone."""
        return 1

    def storage(self, sections: tuple[int, ...], in_features: int, *, wide: DType) -> dict[str, StoredSpec]:
        """One tensor, [O, I], in the wide dtype."""
        return {"weight": StoredSpec((total_rows(sections), in_features), wide)}

    def section_views(
        self, stored: Mapping[str, torch.Tensor], sections: tuple[int, ...], index: int
    ) -> dict[str, torch.Tensor]:
        """The rows of section `index`."""
        return {"weight": stored["weight"][row_range(sections, index)]}

    def quantize_into(self, weight: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """Copy, rounding to the stored dtype where that differs."""
        out["weight"].copy_(weight)

    def dequantize(
        self,
        stored: Mapping[str, torch.Tensor],
        sections: tuple[int, ...],
        *,
        dtype: torch.dtype,
        in_features: int | None = None,
    ) -> torch.Tensor:
        """The weight in `dtype`; the stored tensor itself where the dtypes agree."""
        return stored["weight"].to(dtype)

    def linear(
        self,
        x: torch.Tensor,
        stored: Mapping[str, torch.Tensor],
        sections: tuple[int, ...],
        bias: torch.Tensor | None,
        *,
        kernels: Kernels,
    ) -> torch.Tensor:
        """x [..., I] -> [..., O] in x's dtype."""
        return kernels.wide(x, stored["weight"], bias)

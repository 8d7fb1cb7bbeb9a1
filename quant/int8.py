"""INT8 weights, symmetric, a float32 scale per output channel: scale = amax / 127, stored = round(weight / scale).

With a `percentile` the magnitude at it stands for amax (quant.magnitudes), and what lies beyond saturates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.dtypes import DType
from quant.percentile import check_percentile
from quant.scheme import StoredSpec
from quant.sections import row_views, total_rows

if TYPE_CHECKING:
    import torch

    from quant.kernels import Kernels


@dataclass(frozen=True)
class Int8PerChannel:
    """{"weight": [O, I] from -127 to 127, "weight_scale": [O]}."""

    percentile: float | None = None

    def __post_init__(self) -> None:
        check_percentile(self.percentile)

    @property
    def name(self) -> str:
        """The name on the command line."""
        return "int8_per_channel"

    @property
    def row_multiple(self) -> int:
        """1: each row has a scale of its own."""
        return 1

    def storage(self, sections: tuple[int, ...], in_features: int, *, wide: DType) -> dict[str, StoredSpec]:
        """One byte a number, one float32 a row."""
        rows = total_rows(sections)
        return {
            "weight": StoredSpec((rows, in_features), DType.I8),
            "weight_scale": StoredSpec((rows,), DType.F32),
        }

    def section_views(
        self, stored: Mapping[str, torch.Tensor], sections: tuple[int, ...], index: int
    ) -> dict[str, torch.Tensor]:
        """The section's rows of both."""
        return row_views(stored, sections, index)

    def quantize_into(self, weight: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """A scale for each row."""
        from quant.int8_codec import INT8

        INT8.quantize_rows(weight, out=out["weight"], scale=out["weight_scale"], percentile=self.percentile)

    def dequantize(
        self,
        stored: Mapping[str, torch.Tensor],
        sections: tuple[int, ...],
        *,
        dtype: torch.dtype,
        in_features: int | None = None,
    ) -> torch.Tensor:
        """number x scale, in float32, rounded once."""
        return stored["weight"].float().mul_(stored["weight_scale"].unsqueeze(1)).to(dtype)

    def linear(
        self,
        x: torch.Tensor,
        stored: Mapping[str, torch.Tensor],
        sections: tuple[int, ...],
        bias: torch.Tensor | None,
        *,
        kernels: Kernels,
    ) -> torch.Tensor:
        """x [..., I] -> [..., O]."""
        return kernels.int8(x, stored["weight"], stored["weight_scale"], bias)

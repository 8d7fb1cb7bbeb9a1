"""FP8 weights (e4m3fn) with float32 scales: one per section, per output channel, or per block (128 x 128).

Scale = amax / 448, stored = e4m3fn(weight / scale). Per-tensor scales keep one slot for each section of a fused weight.
With a `percentile` the magnitude at it stands for amax (quant.magnitudes), and what lies beyond saturates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.dtypes import DType
from quant.errors import QuantError
from quant.percentile import check_percentile
from quant.scheme import StoredSpec
from quant.sections import dequantize_by_section, for_each_row, linear_by_section, row_range, row_views, total_rows

if TYPE_CHECKING:
    import torch

    from quant.kernels import Kernels

BLOCK = 128


@dataclass(frozen=True)
class Fp8PerTensor:
    """{"weight": [O, I], "weight_scale": [sections]}."""

    percentile: float | None = None

    def __post_init__(self) -> None:
        check_percentile(self.percentile)

    @property
    def name(self) -> str:
        """The name on the command line."""
        return "fp8_per_tensor"

    @property
    def row_multiple(self) -> int:
        """0: the scale is taken over all rows of a section."""
        return 0

    def storage(self, sections: tuple[int, ...], in_features: int, *, wide: DType) -> dict[str, StoredSpec]:
        """One byte a number, one float32 a section."""
        return {
            "weight": StoredSpec((total_rows(sections), in_features), DType.F8_E4M3),
            "weight_scale": StoredSpec((len(sections),), DType.F32),
        }

    def section_views(
        self, stored: Mapping[str, torch.Tensor], sections: tuple[int, ...], index: int
    ) -> dict[str, torch.Tensor]:
        """The section's rows and its slot."""
        return {
            "weight": stored["weight"][row_range(sections, index)],
            "weight_scale": stored["weight_scale"][index : index + 1],
        }

    def quantize_into(self, weight: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """One scale for all of `weight`."""
        from quant.float8_codec import FLOAT8

        FLOAT8.quantize_tensor(weight, out=out["weight"], scale=out["weight_scale"], percentile=self.percentile)

    def dequantize(
        self,
        stored: Mapping[str, torch.Tensor],
        sections: tuple[int, ...],
        *,
        dtype: torch.dtype,
        in_features: int | None = None,
    ) -> torch.Tensor:
        """code x scale, in float32, rounded once."""
        return stored["weight"].float().mul_(for_each_row(stored["weight_scale"], sections).unsqueeze(1)).to(dtype)

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
        return kernels.float8(x, stored["weight"], for_each_row(stored["weight_scale"], sections), bias)


@dataclass(frozen=True)
class Fp8PerChannel:
    """{"weight": [O, I], "weight_scale": [O]}."""

    percentile: float | None = None

    def __post_init__(self) -> None:
        check_percentile(self.percentile)

    @property
    def name(self) -> str:
        """The name on the command line."""
        return "fp8_per_channel"

    @property
    def row_multiple(self) -> int:
        """1: each row has a scale of its own."""
        return 1

    def storage(self, sections: tuple[int, ...], in_features: int, *, wide: DType) -> dict[str, StoredSpec]:
        """One byte a number, one float32 a row."""
        rows = total_rows(sections)
        return {
            "weight": StoredSpec((rows, in_features), DType.F8_E4M3),
            "weight_scale": StoredSpec((rows,), DType.F32),
        }

    def section_views(
        self, stored: Mapping[str, torch.Tensor], sections: tuple[int, ...], index: int
    ) -> dict[str, torch.Tensor]:
        """The section's rows of both."""
        return row_views(stored, sections, index)

    def quantize_into(self, weight: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """A scale for each row."""
        from quant.float8_codec import FLOAT8

        FLOAT8.quantize_rows(weight, out=out["weight"], scale=out["weight_scale"], percentile=self.percentile)

    def dequantize(
        self,
        stored: Mapping[str, torch.Tensor],
        sections: tuple[int, ...],
        *,
        dtype: torch.dtype,
        in_features: int | None = None,
    ) -> torch.Tensor:
        """code x scale, in float32, rounded once."""
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
        return kernels.float8(x, stored["weight"], stored["weight_scale"], bias)


@dataclass(frozen=True)
class Fp8PerBlock:
    """{"weight": [O, I], "weight_scale": [blocks of rows, blocks of columns]}, blocks of `block` rows x columns from
    each section's first row; the last of a section or a row may be smaller. Other blocks than 128 x 128 are only kept,
    where a checkpoint has them: weights are quantized in those."""

    percentile: float | None = None
    block: tuple[int, int] = (BLOCK, BLOCK)

    def __post_init__(self) -> None:
        check_percentile(self.percentile)
        if min(self.block) < 1:
            raise QuantError(f"a block of {self.block[0]} x {self.block[1]} numbers")

    @property
    def name(self) -> str:
        """The name on the command line; with the block's sizes where that has none for it."""
        return "fp8_per_block" if self.block == (BLOCK, BLOCK) else f"fp8_per_block_{self.block[0]}x{self.block[1]}"

    @property
    def row_multiple(self) -> int:
        """A block's height."""
        return self.block[0]

    def storage(self, sections: tuple[int, ...], in_features: int, *, wide: DType) -> dict[str, StoredSpec]:
        """One byte a number, one float32 a block."""
        return {
            "weight": StoredSpec((total_rows(sections), in_features), DType.F8_E4M3),
            "weight_scale": StoredSpec((sum(self._blocks(sections)), -(-in_features // self.block[1])), DType.F32),
        }

    def section_views(
        self, stored: Mapping[str, torch.Tensor], sections: tuple[int, ...], index: int
    ) -> dict[str, torch.Tensor]:
        """The section's rows, and its rows of scales."""
        return {
            "weight": stored["weight"][row_range(sections, index)],
            "weight_scale": stored["weight_scale"][row_range(self._blocks(sections), index)],
        }

    def quantize_into(self, weight: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """A scale for each block of 128 x 128; QuantError for others."""
        from quant.float8_blocks import encode_blocks

        if self.block != (BLOCK, BLOCK):
            raise QuantError(f"{self.name}: weights are quantized in blocks of {BLOCK} x {BLOCK}")

        encode_blocks(weight, out["weight_scale"], out["weight"], percentile=self.percentile)

    def dequantize(
        self,
        stored: Mapping[str, torch.Tensor],
        sections: tuple[int, ...],
        *,
        dtype: torch.dtype,
        in_features: int | None = None,
    ) -> torch.Tensor:
        """code x its block's scale, in float32, rounded once."""
        from quant.float8_blocks import scale_by_number

        def numbers(views: Mapping[str, torch.Tensor]) -> torch.Tensor:
            codes = views["weight"]
            return codes.float().mul_(scale_by_number(views["weight_scale"], codes.shape, block=self.block))

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
        """x [..., I] -> [..., O]: section by section, since each begins a block of its own."""

        def product(views: Mapping[str, torch.Tensor], part: torch.Tensor | None) -> torch.Tensor:
            return kernels.float8_blocks(x, views["weight"], views["weight_scale"], part, block=self.block)

        return linear_by_section(self, stored, sections, bias, product=product)

    def _blocks(self, sections: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-rows // self.block[0]) for rows in sections)


FLOAT8_SCHEMES = (Fp8PerTensor, Fp8PerChannel, Fp8PerBlock)
"""The schemes of e4m3 under float32 scales."""

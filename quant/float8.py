"""FP8 weights (e4m3fn) with float32 scales: one per section, per output channel, or per block of 128 x 128.

Scale = amax / 448, stored = e4m3fn(weight / scale). Per-tensor scales keep one slot for each section of a fused weight.
"""

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

BLOCK = 128


@dataclass(frozen=True)
class Fp8PerTensor:
    """{"weight": [O, I], "weight_scale": [sections]}."""

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
        from quant.float8_codec import encode_rows, row_amax, scale_of
        from quant.panels import Workspace

        workspace = Workspace()
        out["weight_scale"].copy_(scale_of(row_amax(weight, workspace).amax().view(1)))
        encode_rows(weight, out["weight_scale"], out["weight"], workspace)

    def dequantize(
        self, stored: Mapping[str, torch.Tensor], sections: tuple[int, ...], *, dtype: torch.dtype
    ) -> torch.Tensor:
        """code x scale, in float32, rounded once."""
        return (stored["weight"].float() * self._rows(stored, sections).unsqueeze(1)).to(dtype)

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
        return kernels.float8(x, stored["weight"], self._rows(stored, sections), bias)

    def _rows(self, stored: Mapping[str, torch.Tensor], sections: tuple[int, ...]) -> torch.Tensor:
        import torch

        scale = stored["weight_scale"]
        if len(sections) == 1:
            return scale.expand(sections[0])
        return torch.cat([scale[index : index + 1].expand(rows) for index, rows in enumerate(sections)])


@dataclass(frozen=True)
class Fp8PerChannel:
    """{"weight": [O, I], "weight_scale": [O]}."""

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
        return {name: tensor[row_range(sections, index)] for name, tensor in stored.items()}

    def quantize_into(self, weight: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """A scale for each row."""
        from quant.float8_codec import encode_rows, row_amax, scale_of
        from quant.panels import Workspace

        workspace = Workspace()
        out["weight_scale"].copy_(scale_of(row_amax(weight, workspace)))
        encode_rows(weight, out["weight_scale"], out["weight"], workspace)

    def dequantize(
        self, stored: Mapping[str, torch.Tensor], sections: tuple[int, ...], *, dtype: torch.dtype
    ) -> torch.Tensor:
        """code x scale, in float32, rounded once."""
        return (stored["weight"].float() * stored["weight_scale"].unsqueeze(1)).to(dtype)

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
    """{"weight": [O, I], "weight_scale": [blocks of rows, blocks of columns]}, blocks of 128 x 128 from each section's
    first row; the last of a section or a row may be smaller."""

    @property
    def name(self) -> str:
        """The name on the command line."""
        return "fp8_per_block"

    @property
    def row_multiple(self) -> int:
        """A block's height."""
        return BLOCK

    def storage(self, sections: tuple[int, ...], in_features: int, *, wide: DType) -> dict[str, StoredSpec]:
        """One byte a number, one float32 a block."""
        return {
            "weight": StoredSpec((total_rows(sections), in_features), DType.F8_E4M3),
            "weight_scale": StoredSpec((sum(_blocks(sections)), -(-in_features // BLOCK)), DType.F32),
        }

    def section_views(
        self, stored: Mapping[str, torch.Tensor], sections: tuple[int, ...], index: int
    ) -> dict[str, torch.Tensor]:
        """The section's rows, and its rows of scales."""
        return {
            "weight": stored["weight"][row_range(sections, index)],
            "weight_scale": stored["weight_scale"][row_range(_blocks(sections), index)],
        }

    def quantize_into(self, weight: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """A scale for each block."""
        from quant.float8_blocks import encode_blocks

        encode_blocks(weight, out["weight_scale"], out["weight"])

    def dequantize(
        self, stored: Mapping[str, torch.Tensor], sections: tuple[int, ...], *, dtype: torch.dtype
    ) -> torch.Tensor:
        """code x its block's scale, in float32, rounded once."""
        from quant.float8_blocks import scale_by_number

        parts = []
        for index in range(len(sections)):
            views = self.section_views(stored, sections, index)
            parts.append(views["weight"].float() * scale_by_number(views["weight_scale"], views["weight"].shape))
        import torch

        return torch.cat(parts).to(dtype)

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
        import torch

        if len(sections) == 1:
            return kernels.float8_blocks(x, stored["weight"], stored["weight_scale"], bias)
        biases = [None] * len(sections) if bias is None else list(bias.split(list(sections)))
        outs = []
        for index, part in enumerate(biases):
            views = self.section_views(stored, sections, index)
            outs.append(kernels.float8_blocks(x, views["weight"], views["weight_scale"], part))
        return torch.cat(outs, dim=-1)


def _blocks(sections: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-rows // BLOCK) for rows in sections)

"""A scheme for tests: whole numbers times a scale for each run of rows; plain enough to be checked by eye."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from quant.dtypes import DType
from quant.kernels import Kernels
from quant.scheme import StoredSpec


@dataclass(frozen=True)
class RowScales:
    """`weight` int8 [O, I], `weight_scale` float32: one for each `row_multiple` rows of a section, or (0) for all."""

    row_multiple: int = 1

    @property
    def name(self) -> str:
        return f"row_scales:{self.row_multiple}"

    def storage(self, sections: tuple[int, ...], in_features: int, *, wide: DType) -> dict[str, StoredSpec]:
        assert wide.is_wide
        return {
            "weight": StoredSpec((sum(sections), in_features), DType.I8),
            "weight_scale": StoredSpec((sum(self._scales(rows) for rows in sections),), DType.F32),
        }

    def section_views(
        self, stored: Mapping[str, torch.Tensor], sections: tuple[int, ...], index: int
    ) -> dict[str, torch.Tensor]:
        counts = [self._scales(rows) for rows in sections]
        return {
            "weight": stored["weight"][sum(sections[:index]) :][: sections[index]],
            "weight_scale": stored["weight_scale"][sum(counts[:index]) :][: counts[index]],
        }

    def quantize_into(self, weight: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        height = self.row_multiple or weight.shape[0]
        for index, rows in enumerate(torch.split(weight.float(), height)):
            scale = rows.abs().max() / 127
            out["weight_scale"][index] = scale
            out["weight"][index * height :][: len(rows)] = (rows / scale).round().to(torch.int8)

    def dequantize(
        self,
        stored: Mapping[str, torch.Tensor],
        sections: tuple[int, ...],
        *,
        dtype: torch.dtype,
        in_features: int | None = None,
    ) -> torch.Tensor:
        parts = []
        for index, rows in enumerate(sections):
            views = self.section_views(stored, sections, index)
            scales = views["weight_scale"].repeat_interleave(self.row_multiple or rows)[:rows]
            parts.append(views["weight"].float() * scales[:, None])
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
        return kernels.wide(x, self.dequantize(stored, sections, dtype=x.dtype), bias)

    def _scales(self, rows: int) -> int:
        return -(-rows // self.row_multiple) if self.row_multiple else 1


def quantized(weight: torch.Tensor, sections: tuple[int, ...], *, row_multiple: int) -> torch.Tensor:
    """What the scheme makes of a weight, by way of padding to whole runs: an independent computation."""
    parts = []
    for rows in torch.split(weight.float(), list(sections)):
        height = row_multiple or rows.shape[0]
        runs = torch.unflatten(functional.pad(rows, (0, 0, 0, -rows.shape[0] % height)), 0, (-1, height))
        scales = runs.abs().amax((1, 2), keepdim=True) / 127
        parts.append(((runs / scales).round() * scales).flatten(0, 1)[: rows.shape[0]])
    return torch.cat(parts)

"""The contract of a quantization scheme: what is stored for a weight, how it is made, how a matmul reads it.

A linear weight may be fused from several *sections* (q, k and v in qkv_proj): a run of rows each. Every scheme treats
each section by itself (its scales never cross a section's edge), so a section can be read, quantized and written into
its part of the stored tensors while its neighbours are still on disk. Hence the two-step form: `storage` says what the
whole parameter keeps, `section_views` gives the part of it that one section fills, `quantize_into` fills it.

T rows of activations, O out_features, I in_features. Weights are [O, I]; activations [..., I].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

from quant.dtypes import DType

if TYPE_CHECKING:
    import torch

    from quant.kernels import Kernels


@dataclass(frozen=True)
class StoredSpec:
    """Shape and dtype of one tensor that a scheme keeps for a weight."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return prod(self.shape) * self.dtype.itemsize


def empty_stored(specs: Mapping[str, StoredSpec], *, device: str | torch.device) -> dict[str, torch.Tensor]:
    """Uninitialized tensors of these specs."""
    import torch

    from quant.dtypes import to_torch

    return {name: torch.empty(one.shape, dtype=to_torch(one.dtype), device=device) for name, one in specs.items()}


class Scheme(Protocol):
    """How a linear weight is kept. Implementations are frozen dataclasses; the first two methods import no torch."""

    @property
    def name(self) -> str:
        """The name on the command line, such as "fp8_per_channel"; "none" for wide weights."""
        ...

    @property
    def row_multiple(self) -> int:
        """Rows that must be quantized together: 1 where each row stands alone, a block's height, 0 for the section."""
        ...

    def storage(self, sections: tuple[int, ...], in_features: int, *, wide: DType) -> dict[str, StoredSpec]:
        """What is kept for a weight of sum(sections) rows: "weight", and "weight_scale" where there are scales.

        `wide` is the dtype of the weight before it is quantized (and what scheme "none" keeps).
        """
        ...

    def section_views(
        self, stored: Mapping[str, torch.Tensor], sections: tuple[int, ...], index: int
    ) -> dict[str, torch.Tensor]:
        """The parts of the stored tensors that section `index` fills: views, same names."""
        ...

    def quantize_into(self, weight: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """Fill the views of one section from its wide weight [rows, I] (any wide dtype, on out's device)."""
        ...

    def dequantize(
        self,
        stored: Mapping[str, torch.Tensor],
        sections: tuple[int, ...],
        *,
        dtype: torch.dtype,
        in_features: int | None = None,
    ) -> torch.Tensor:
        """The wide weight [O, I] that the stored form stands for: the product in float32, rounded to `dtype` once.

        `in_features` is I. Two numbers to a byte do not tell whether the last one is there: where it is not given, it
        is taken to be, so that an odd I comes with one more column, to be left out.
        """
        ...

    def linear(
        self,
        x: torch.Tensor,
        stored: Mapping[str, torch.Tensor],
        sections: tuple[int, ...],
        bias: torch.Tensor | None,
        *,
        kernels: Kernels,
    ) -> torch.Tensor:
        """x [..., I] times the weight's transpose, plus bias [O]: [..., O] in x's dtype."""
        ...

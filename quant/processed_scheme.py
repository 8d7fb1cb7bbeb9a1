"""A scheme as a device's modules see it, whose stored tensors have been through quant.post_processing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quant.dtypes import DType
from quant.post_processing import Step, process
from quant.scheme import Scheme, StoredSpec

if TYPE_CHECKING:
    import torch

    from quant.kernels import Kernels


@dataclass(frozen=True)
class Processed:
    """`scheme` with its stored tensors after `steps`: other dtypes, the same shapes, sections and numbers."""

    scheme: Scheme
    steps: tuple[Step, ...]

    @property
    def name(self) -> str:
        """The scheme's own: the numbers are the same."""
        return self.scheme.name

    @property
    def row_multiple(self) -> int:
        """The scheme's own."""
        return self.scheme.row_multiple

    def storage(self, sections: tuple[int, ...], in_features: int, *, wide: DType) -> dict[str, StoredSpec]:
        """The scheme's, in the dtypes behind the steps."""
        found = self.scheme.storage(sections, in_features, wide=wide)
        if Step.FNUZ in self.steps:
            found["weight"] = replace(found["weight"], dtype=DType.F8_E4M3FNUZ)
        return found

    def section_views(
        self, stored: Mapping[str, torch.Tensor], sections: tuple[int, ...], index: int
    ) -> dict[str, torch.Tensor]:
        """The scheme's own: no step moves anything."""
        return self.scheme.section_views(stored, sections, index)

    def quantize_into(self, weight: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """Quantized as ever, and processed."""
        import torch

        before = dict(out)
        if Step.FNUZ in self.steps:
            before["weight"] = out["weight"].view(torch.float8_e4m3fn)
        self.scheme.quantize_into(weight, before)
        process(before, self.steps)

    def dequantize(
        self,
        stored: Mapping[str, torch.Tensor],
        sections: tuple[int, ...],
        *,
        dtype: torch.dtype,
        in_features: int | None = None,
    ) -> torch.Tensor:
        """The scheme's own."""
        return self.scheme.dequantize(stored, sections, dtype=dtype, in_features=in_features)

    def linear(
        self,
        x: torch.Tensor,
        stored: Mapping[str, torch.Tensor],
        sections: tuple[int, ...],
        bias: torch.Tensor | None,
        *,
        kernels: Kernels,
    ) -> torch.Tensor:
        """x [..., I] -> [..., O]: kernels tell the dtypes apart."""
        return self.scheme.linear(x, stored, sections, bias, kernels=kernels)

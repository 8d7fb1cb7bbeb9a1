"""Microscaled weights: small floats in blocks of a row that share a scale. mxfp8, mxfp4 (OCP MX 1.0) and nvfp4.

MX: 32 numbers share an E8M0 scale 2^(floor(log2 amax) - 8 for e4m3fn, - 2 for E2M1), and saturate. A block of zeros
has scale code 0 (2^-127), one with NaN or infinity scale code 0xFF (NaN). nvfp4: 16 numbers share an E4M3 scale, under
one float32 scale amax / (448 * 6) for the section; both multiply. E2M1 codes lie two a byte, the even column in the low
nibble; an odd last column leaves the high nibble 0. The last block of a row may be short. See quant.mx_codec.

Smaller blocks are only kept: a part of a weight has them where a cut went through its blocks (quant.cuts).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.dtypes import DType
from quant.errors import QuantError
from quant.scheme import StoredSpec
from quant.sections import for_each_row, row_views, total_rows

if TYPE_CHECKING:
    import torch

    from quant.kernels import Kernels

MX_BLOCK = 32
NV_BLOCK = 16


def _named(name: str, block: int, usual: int) -> str:
    return name if block == usual else f"{name}:{block}"


def _check_size(block: int) -> None:
    if block < 1:
        raise QuantError(f"a block of {block} numbers")


def _check_quantizes(scheme: MxFp8 | MxFp4 | NvFp4, usual: int) -> None:
    if scheme.block != usual:
        raise QuantError(f"{scheme.name}: weights are quantized in blocks of {usual}")


@dataclass(frozen=True)
class MxFp8:
    """{"weight": e4m3fn [O, I], "weight_scale": E8M0 [O, ceil(I / 32)]}."""

    block: int = MX_BLOCK

    def __post_init__(self) -> None:
        _check_size(self.block)

    @property
    def name(self) -> str:
        """The name on the command line."""
        return _named("mxfp8", self.block, MX_BLOCK)

    @property
    def row_multiple(self) -> int:
        """1: no block reaches into another row."""
        return 1

    def storage(self, sections: tuple[int, ...], in_features: int, *, wide: DType) -> dict[str, StoredSpec]:
        """One byte a number, one a block."""
        rows = total_rows(sections)
        return {
            "weight": StoredSpec((rows, in_features), DType.F8_E4M3),
            "weight_scale": StoredSpec((rows, -(-in_features // self.block)), DType.F8_E8M0),
        }

    def section_views(
        self, stored: Mapping[str, torch.Tensor], sections: tuple[int, ...], index: int
    ) -> dict[str, torch.Tensor]:
        """The section's rows of both."""
        return row_views(stored, sections, index)

    def quantize_into(self, weight: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """A scale for each block."""
        from quant.mx_codec import encode_mxfp8

        _check_quantizes(self, MX_BLOCK)
        encode_mxfp8(weight, out["weight_scale"], out["weight"])

    def dequantize(
        self,
        stored: Mapping[str, torch.Tensor],
        sections: tuple[int, ...],
        *,
        dtype: torch.dtype,
        in_features: int | None = None,
    ) -> torch.Tensor:
        """code x scale, in float32, rounded once."""
        from quant.mx_codec import decode

        weight = stored["weight"]
        return decode(weight, stored["weight_scale"], block=self.block, in_features=weight.shape[1]).to(dtype)

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
        from quant.mx_strips import ScaledBlocks

        return kernels.microscaled(x, ScaledBlocks(stored["weight"], stored["weight_scale"], self.block), bias)


@dataclass(frozen=True)
class MxFp4:
    """{"weight": uint8 [O, ceil(I / 2)] (E2M1 nibbles), "weight_scale": E8M0 [O, ceil(I / 32)]}."""

    block: int = MX_BLOCK

    def __post_init__(self) -> None:
        _check_size(self.block)

    @property
    def name(self) -> str:
        """The name on the command line."""
        return _named("mxfp4", self.block, MX_BLOCK)

    @property
    def row_multiple(self) -> int:
        """1: no block reaches into another row."""
        return 1

    def storage(self, sections: tuple[int, ...], in_features: int, *, wide: DType) -> dict[str, StoredSpec]:
        """Half a byte a number, one byte a block."""
        rows = total_rows(sections)
        return {
            "weight": StoredSpec((rows, -(-in_features // 2)), DType.U8),
            "weight_scale": StoredSpec((rows, -(-in_features // self.block)), DType.F8_E8M0),
        }

    def section_views(
        self, stored: Mapping[str, torch.Tensor], sections: tuple[int, ...], index: int
    ) -> dict[str, torch.Tensor]:
        """The section's rows of both."""
        return row_views(stored, sections, index)

    def quantize_into(self, weight: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """A scale for each block."""
        from quant.mx_codec import encode_mxfp4

        _check_quantizes(self, MX_BLOCK)
        encode_mxfp4(weight, out["weight_scale"], out["weight"])

    def dequantize(
        self,
        stored: Mapping[str, torch.Tensor],
        sections: tuple[int, ...],
        *,
        dtype: torch.dtype,
        in_features: int | None = None,
    ) -> torch.Tensor:
        """code x scale, in float32, rounded once.

        Nibbles do not tell whether the last one is a number: where `in_features` is not given it is taken for one, so
        an odd number of columns comes with one more, to be left out.
        """
        from quant.mx_codec import decode

        columns = 2 * stored["weight"].shape[1] if in_features is None else in_features
        return decode(stored["weight"], stored["weight_scale"], block=self.block, in_features=columns).to(dtype)

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
        from quant.mx_strips import ScaledBlocks

        return kernels.microscaled(x, ScaledBlocks(stored["weight"], stored["weight_scale"], self.block), bias)


@dataclass(frozen=True)
class NvFp4:
    """{"weight": uint8 [O, ceil(I / 2)] (E2M1 nibbles), "weight_scale": e4m3fn [O, ceil(I / 16)],
    "weight_global_scale": float32 [sections]}.

    number = code x scale x global scale; or, where that `divides` (as compressed-tensors has it), code x (scale /
    global scale), the quotient rounded to float32.
    """

    divides: bool = False
    block: int = NV_BLOCK

    def __post_init__(self) -> None:
        _check_size(self.block)

    @property
    def name(self) -> str:
        """The name on the command line."""
        return _named("nvfp4", self.block, NV_BLOCK)

    @property
    def row_multiple(self) -> int:
        """0: the global scale is taken over all rows of a section."""
        return 0

    def storage(self, sections: tuple[int, ...], in_features: int, *, wide: DType) -> dict[str, StoredSpec]:
        """Half a byte a number, one byte a block, one float32 a section."""
        rows = total_rows(sections)
        return {
            "weight": StoredSpec((rows, -(-in_features // 2)), DType.U8),
            "weight_scale": StoredSpec((rows, -(-in_features // self.block)), DType.F8_E4M3),
            "weight_global_scale": StoredSpec((len(sections),), DType.F32),
        }

    def section_views(
        self, stored: Mapping[str, torch.Tensor], sections: tuple[int, ...], index: int
    ) -> dict[str, torch.Tensor]:
        """The section's rows, and its slot."""
        whole = stored["weight_global_scale"][index : index + 1]
        return row_views(stored, sections, index) | {"weight_global_scale": whole}

    def quantize_into(self, weight: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """A scale for each block, and one for all of `weight`."""
        from quant.mx_codec import encode_nvfp4

        _check_quantizes(self, NV_BLOCK)
        encode_nvfp4(weight, out["weight_scale"], out["weight_global_scale"], out["weight"])
        if self.divides:
            out["weight_global_scale"].reciprocal_()

    def dequantize(
        self,
        stored: Mapping[str, torch.Tensor],
        sections: tuple[int, ...],
        *,
        dtype: torch.dtype,
        in_features: int | None = None,
    ) -> torch.Tensor:
        """(code x scale), which is exact, x global scale, in float32, rounded once; `in_features` as for mxfp4."""
        from quant.mx_codec import decode, e4m3_numbers

        columns = 2 * stored["weight"].shape[1] if in_features is None else in_features
        whole = for_each_row(stored["weight_global_scale"], sections).unsqueeze(1)
        if self.divides:
            scale = e4m3_numbers(stored["weight_scale"]).div_(whole)
            return decode(stored["weight"], scale, block=self.block, in_features=columns).to(dtype)
        wide = decode(stored["weight"], stored["weight_scale"], block=self.block, in_features=columns)
        return wide.mul_(whole).to(dtype)

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
        from quant.mx_strips import ScaledBlocks

        rows = for_each_row(stored["weight_global_scale"], sections)
        rows = rows.reciprocal() if self.divides else rows
        return kernels.microscaled(x, ScaledBlocks(stored["weight"], stored["weight_scale"], self.block, rows), bias)

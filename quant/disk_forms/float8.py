"""FP8 on disk (quant_method fp8, fbgemm_fp8, mxfp8): e4m3 codes with a scale per tensor, row or block.

The number beside the codes always *multiplies* them, whatever it is called (`weight_scale_inv` too). What a block is
stands in the configuration (weight_block_size): the grid of scales cannot tell it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quant.disk_forms.form import DiskForm, DiskTensor, FoundTensor
from quant.disk_forms.scales import E8M0, FLOATS, OF_ACTIVATIONS
from quant.disk_forms.settings import LARGEST, ignored_modules
from quant.dtypes import DType
from quant.errors import QuantError
from quant.float8 import Fp8PerBlock, Fp8PerChannel, Fp8PerTensor
from quant.microscaling import MX_BLOCK, MxFp8
from quant.module_patterns import any_matches
from quant.scheme import Scheme

if TYPE_CHECKING:
    import torch

IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore")
SCALES = ("weight_scale_inv", "weight_scale")
_SCALE_DTYPES = (*FLOATS, DType.F8_E8M0)
_MX = (1, MX_BLOCK)


@dataclass(frozen=True)
class Fp8OnDisk:
    """`weight` e4m3 [O, I] and its scales under the name `scale`; `kept` says what they are for.

    A weight that is fused on disk may have one scale for each of its parts, which have `parts` rows: kept for each row.
    """

    kept: Scheme
    scale: str
    parts: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """What it is called in messages."""
        if isinstance(self.kept, MxFp8):
            return "MXFP8"
        return f"FP8, scales {self.kept.name.removeprefix('fp8_').replace('_', ' ')}"

    def tensors(self, rows: int, in_features: int) -> tuple[DiskTensor, ...]:
        """Scales, then codes; scales of activations are not used."""
        return (
            DiskTensor("input_scale", ((), (1,), (1, 1)), _SCALE_DTYPES, optional=True, unused=OF_ACTIVATIONS),
            DiskTensor("input_scale_ub", ((), (1,), (1, 1)), _SCALE_DTYPES, optional=True, unused=OF_ACTIVATIONS),
            DiskTensor(self.scale, self._scale_shapes(rows, in_features), self._scale_dtypes, "weight_scale"),
            DiskTensor("weight", ((rows, in_features),), (DType.F8_E4M3,), "weight", as_is=True),
        )

    @property
    def _scale_dtypes(self) -> tuple[DType, ...]:
        return E8M0 if isinstance(self.kept, MxFp8) else _SCALE_DTYPES

    def _scale_shapes(self, rows: int, in_features: int) -> tuple[tuple[int, ...], ...]:
        if isinstance(self.kept, Fp8PerTensor):
            return ((), (1,), (1, 1))
        if isinstance(self.kept, Fp8PerChannel):
            of_parts = ((len(self.parts),), (len(self.parts), 1)) if self.parts else ()
            return ((rows, 1), (rows,), *of_parts)
        height, width = self.kept.block if isinstance(self.kept, Fp8PerBlock) else (1, MX_BLOCK)
        down, across = -(-rows // height), -(-in_features // width)
        return ((down, across), (down, 1, across, 1))

    def with_parts(self, rows: tuple[int, ...]) -> Fp8OnDisk:
        """The form of a weight that is fused from parts of so many rows."""
        return replace(self, parts=rows) if len(rows) > 1 and isinstance(self.kept, Fp8PerChannel) else self

    def place(self, leaf: str, tensor: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """Scales become float32, exactly; E8M0 scales stay for blocks of 32."""
        import torch

        target = out["weight_scale"] if leaf == self.scale else out["weight"]
        if target.dtype == torch.float8_e8m0fnu:
            target.view(torch.uint8).copy_(tensor.view(torch.uint8).reshape(target.shape))
            return
        if tensor.dtype == torch.float8_e8m0fnu:
            from quant.e8m0 import numbers

            tensor = numbers(tensor)
        if leaf == self.scale and tensor.numel() != target.numel():
            counts = torch.tensor(self.parts, device=tensor.device)
            tensor = tensor.reshape(-1).repeat_interleave(counts, output_size=target.numel())
        target.copy_(tensor.reshape(target.shape))


@dataclass(frozen=True)
class Fp8Method:
    """A configuration of quant_method fp8: `block` is weight_block_size, None for scales per tensor or row.

    The reading of it in `form_of` serves the FP8 of other methods too.
    """

    block: tuple[int, int] | None = None
    ignore: tuple[str, ...] = ()
    name: str = "fp8"

    def form_of(self, module: str, found: Mapping[str, FoundTensor], shape: tuple[int, int]) -> DiskForm | None:
        """What the tensors show: float8 codes have a scale, and a wide weight stays wide."""
        weight = found.get("weight")
        if weight is None or weight.dtype.is_wide:
            return None
        if weight.dtype is not DType.F8_E4M3:
            raise QuantError(f"weight is {weight.dtype.value}, but FP8 weights are {DType.F8_E4M3.value}")
        scale = next((leaf for leaf in SCALES if leaf in found), None)
        if scale is None:
            raise QuantError(f"its weight is FP8, but it has no scale ({' or '.join(SCALES)})")
        return Fp8OnDisk(self._kept(found[scale]), scale)

    def _kept(self, scale: FoundTensor) -> Scheme:
        if self.block is not None and len(scale.shape) in (2, 4):
            return MxFp8() if self.block == _MX and scale.dtype in E8M0 else Fp8PerBlock(block=self.block)
        numel = 1
        for size in scale.shape:
            numel *= size
        return Fp8PerTensor() if numel == 1 else Fp8PerChannel()

    def excludes(self, module: str) -> bool:
        """By the configuration's list."""
        return any_matches(self.ignore, module)


def fp8_method(config: Mapping[str, Any]) -> Fp8Method:
    """The method of a quantization_config. Raises QuantError for what cannot be read."""
    return Fp8Method(_block_size(config), ignored_modules(config, *IGNORED))


def mxfp8_method(config: Mapping[str, Any]) -> Fp8Method:
    """The method of a quantization_config of quant_method mxfp8. Raises QuantError for what cannot be read."""
    block = _block_size(config)
    if block is not None and block != _MX:
        raise QuantError(f"weight_block_size {list(block)}: the blocks of mxfp8 are {list(_MX)}")
    return Fp8Method(_MX, ignored_modules(config, *IGNORED), "mxfp8")


def _block_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    block = config.get("weight_block_size")
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n <= LARGEST for n in block):
        raise QuantError(f"weight_block_size {str(block)[:60]!r}: [rows, columns] are needed, such as [128, 128]")
    return block[0], block[1]

"""MXFP4 on disk (quant_method mxfp4): each expert's projection as blocks of 32 E2M1 codes and their E8M0 scales.

`blocks` U8 [O, I / 32, 16], the even column in the low nibble; `scales` U8 [O, I / 32]. Both are, byte for byte, what
is kept. O out_features, I in_features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quant.disk_forms.form import DiskForm, DiskTensor, FoundTensor
from quant.disk_forms.scales import E8M0
from quant.disk_forms.settings import ignored_modules
from quant.dtypes import DType
from quant.errors import QuantError
from quant.microscaling import MX_BLOCK, MxFp4
from quant.module_patterns import any_matches
from quant.scheme import Scheme

if TYPE_CHECKING:
    import torch

_BYTES = MX_BLOCK // 2  # of a block


@dataclass(frozen=True)
class MxFp4OnDisk:
    """`blocks` and `scales` of one expert's projection."""

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return "MXFP4"

    @property
    def kept(self) -> Scheme:
        """mxfp4."""
        return MxFp4()

    def tensors(self, rows: int, in_features: int) -> tuple[DiskTensor, ...]:
        """Scales, then codes."""
        blocks = in_features // MX_BLOCK
        return (
            DiskTensor("scales", ((rows, blocks),), E8M0, "weight_scale", as_is=True),
            DiskTensor("blocks", ((rows, blocks, _BYTES),), (DType.U8,), "weight", as_is=True),
        )

    def place(self, leaf: str, tensor: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """Nothing is left to do: both tensors are kept as they are."""
        raise AssertionError(f"{leaf} is kept as it is")


@dataclass(frozen=True)
class MxFp4Method:
    """A configuration of quant_method mxfp4: `wide` are the modules that are not quantized, "*" for any run of
    characters; what is within one is not either."""

    wide: tuple[str, ...] = ()
    name: str = "mxfp4"

    def form_of(self, module: str, found: Mapping[str, FoundTensor], shape: tuple[int, int]) -> DiskForm | None:
        """What has blocks is MXFP4, whatever the configuration says."""
        if "blocks" not in found and "scales" not in found:
            return None
        lacking = next((leaf for leaf in ("blocks", "scales") if leaf not in found), None)
        if lacking is not None:
            raise QuantError(f"its weight is MXFP4, but it has no {lacking}")
        if shape[1] % MX_BLOCK:
            raise QuantError(f"its weight is MXFP4, but its {shape[1]} inputs are no whole blocks of {MX_BLOCK}")
        return MxFp4OnDisk()

    def excludes(self, module: str) -> bool:
        """By the configuration's list."""
        return any_matches((pattern for name in self.wide for pattern in (name, f"{name}.*")), module)


def mxfp4_method(config: Mapping[str, Any]) -> MxFp4Method:
    """The method of a quantization_config. Raises QuantError for what cannot be read."""
    return MxFp4Method(ignored_modules(config, "modules_to_not_convert"))

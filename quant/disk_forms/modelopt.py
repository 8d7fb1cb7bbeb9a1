"""NVIDIA ModelOpt on disk: FP8 per tensor, row and block, MXFP8, and NVFP4.

The configuration is flat in config.json, or under "quantization" in hf_quant_config.json. NVFP4: `weight` uint8
[O, I / 2] (E2M1 nibbles, the even column low), `weight_scale` e4m3 [O, I / 16] and `weight_scale_2` float32, one for
the tensor; both multiply. Source: ModelOpt's "Unified HuggingFace Checkpoint".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quant.disk_forms.float8 import Fp8Method
from quant.disk_forms.form import DiskForm, DiskTensor, FoundTensor
from quant.disk_forms.scales import OF_ACTIVATIONS
from quant.disk_forms.settings import ignored_modules
from quant.dtypes import DType
from quant.errors import QuantError
from quant.microscaling import MX_BLOCK, NV_BLOCK, NvFp4
from quant.module_patterns import any_matches
from quant.scheme import Scheme

if TYPE_CHECKING:
    import torch

# quant_algo -> the block of its FP8 scales, None where they are per tensor or row (or it is not FP8)
_ALGORITHMS: Mapping[str, tuple[int, int] | None] = {
    "FP8": None, "FP8_PER_CHANNEL_PER_TOKEN": None, "FP8_PB_WO": (128, 128), "MXFP8": (1, MX_BLOCK), "NVFP4": None,
}  # fmt: skip
_MIXED = "MIXED_PRECISION"
_ONE = ((), (1,))


@dataclass(frozen=True)
class NvFp4OnDisk:
    """Kept as it is: only its names differ."""

    name: str = "NVFP4"
    whole: bool = True  # there is a scale for the whole tensor; where not, 1 is kept

    @property
    def kept(self) -> Scheme:
        """One global scale for each run of sections."""
        return NvFp4()

    def tensors(self, rows: int, in_features: int) -> tuple[DiskTensor, ...]:
        """Scales, then codes; QuantError for an odd number of columns, which two codes a byte cannot be."""
        if in_features % 2:
            raise QuantError(f"NVFP4 weights have an even number of columns, not {in_features}")
        scales = (rows, -(-in_features // NV_BLOCK))
        return (
            DiskTensor("input_scale", _ONE, (DType.F32,), optional=True, unused=OF_ACTIVATIONS),
            *([DiskTensor("weight_scale_2", _ONE, (DType.F32,), "weight_global_scale")] if self.whole else []),
            DiskTensor("weight_scale", (scales,), (DType.F8_E4M3,), "weight_scale", as_is=self.whole),
            DiskTensor("weight", ((rows, in_features // 2),), (DType.U8,), "weight", as_is=True),
        )

    def place(self, leaf: str, tensor: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """The scale of the whole tensor, in its slot; others come in runs of rows."""
        if not self.whole:
            out["weight_global_scale"].fill_(1)
        target = out["weight_global_scale" if leaf == "weight_scale_2" else leaf]
        target.copy_(tensor.reshape(target.shape))


@dataclass(frozen=True)
class ModelOptMethod:
    """`algorithm`: of all modules but those in `layers`; `ignore`: patterns of modules that are not quantized."""

    algorithm: str
    layers: Mapping[str, str]
    ignore: tuple[str, ...] = ()
    name: str = "modelopt"

    def form_of(self, module: str, found: Mapping[str, FoundTensor], shape: tuple[int, int]) -> DiskForm | None:
        """What the tensors show; the configuration says how large blocks are."""
        weight = found.get("weight")
        if weight is None or weight.dtype.is_wide:
            return None
        if "pre_quant_scale" in found:
            raise QuantError("its inputs are scaled by pre_quant_scale, which cannot be read")
        if weight.dtype is DType.U8:
            if missing := [leaf for leaf in ("weight_scale", "weight_scale_2") if leaf not in found]:
                raise QuantError(f"its weight is NVFP4, but it has no {' and no '.join(missing)}")
            form = NvFp4OnDisk()
            form.tensors(*shape)
            return form
        return Fp8Method(_ALGORITHMS.get(self.layers.get(module, self.algorithm))).form_of(module, found, shape)

    def excludes(self, module: str) -> bool:
        """By the configuration's patterns."""
        return any_matches(self.ignore, module)


def modelopt_method(config: Mapping[str, Any]) -> ModelOptMethod:
    """The method of a quantization_config or of hf_quant_config.json. Raises QuantError for what cannot be read."""
    inner = config.get("quantization", config)
    if not isinstance(inner, Mapping):
        raise QuantError(f"quantization is {str(inner)[:60]!r}, not an object")
    algorithm, layers = _algorithm(inner.get("quant_algo")), _layers(inner)
    if (algorithm == _MIXED) != bool(layers):
        raise QuantError(f"quant_algo {algorithm} with {len(layers)} quantized_layers")
    size = inner.get("group_size")
    if "NVFP4" in (algorithm, *layers.values()) and size not in (None, NV_BLOCK):
        raise QuantError(f"group_size {str(size)[:60]}: the groups of NVFP4 have {NV_BLOCK} numbers")
    return ModelOptMethod(algorithm, layers, ignored_modules(inner, "exclude_modules", "ignore"))


def _algorithm(found: Any) -> str:
    name = found.upper() if isinstance(found, str) else ""
    if name not in _ALGORITHMS and name != _MIXED:
        raise QuantError(f"quant_algo {str(found)[:60]!r}: {', '.join(_ALGORITHMS)} can be read")
    return name


def _layers(inner: Mapping[str, Any]) -> dict[str, str]:
    found = inner.get("quantized_layers") or {}
    if not isinstance(found, Mapping) or not all(isinstance(one, Mapping) for one in found.values()):
        raise QuantError("quantized_layers: an object for each module is needed")
    return {str(module): _algorithm(one.get("quant_algo")) for module, one in found.items()}

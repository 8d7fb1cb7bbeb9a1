"""torchao on disk: tensor subclasses taken apart, each described in the metadata of its safetensors header.

The subclass `module.weight` is the tensors `module._weight_qdata`, `module._weight_scale` and what else it has; the
metadata says of "module.weight" its class (`_type`) and attributes (`_data`). Source: torchao.prototype.safetensors.

Int8Tensor: int8 codes, a scale for each row. IntxUnpackedToInt8Tensor: codes of 1 to 8 bits in an int8 each, a scale
and an integer zero point for each group of a row; number = (code - zero point) * scale. Float8Tensor: e4m3 codes,
scales for blocks of any size. MXTensor: MXFP8 and MXFP4. NVFP4Tensor: as ModelOpt's. Others are refused: Int4Tensor,
whose zero points are no codes, and layouts for one kind of device, swizzled scales among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quant.disk_forms.float8 import Fp8OnDisk
from quant.disk_forms.form import DiskForm, DiskTensor, FoundTensor
from quant.disk_forms.modelopt import NvFp4OnDisk
from quant.disk_forms.scales import FLOATS
from quant.disk_forms.settings import ignored_modules
from quant.dtypes import DType
from quant.errors import QuantError
from quant.float8 import Fp8PerBlock, Fp8PerChannel, Fp8PerTensor
from quant.int4 import IntPerGroup
from quant.int8 import Int8PerChannel
from quant.microscaling import MX_BLOCK, NV_BLOCK, MxFp4, MxFp8
from quant.module_patterns import any_matches
from quant.scheme import Scheme

if TYPE_CHECKING:
    import torch

DESCRIBED = "tensor_descriptions"  # the key under which the headers' metadata comes with the configuration
_RUN_ROWS = 64  # of codes that are turned at once, so that little is held beside a weight
_CODES, _SCALE, _ZERO, _WHOLE = "_weight_qdata", "_weight_scale", "_weight_zero_point", "_weight_per_tensor_scale"
_LEAVES = {"weight": _CODES, "weight_scale": _SCALE, "weight_scale_2": _WHOLE}  # as another method calls them


@dataclass(frozen=True)
class Renamed:
    """A form of another method, under torchao's names; what they have none for is left out."""

    inner: DiskForm
    name: str

    @property
    def kept(self) -> Scheme:
        """The other form's."""
        return self.inner.kept

    def tensors(self, rows: int, in_features: int) -> tuple[DiskTensor, ...]:
        """The other form's, by these names."""
        from dataclasses import replace

        found = self.inner.tensors(rows, in_features)
        return tuple(replace(one, leaf=_LEAVES[one.leaf]) for one in found if one.leaf in _LEAVES)

    def place(self, leaf: str, tensor: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """As the other form does."""
        self.inner.place(next(inner for inner, here in _LEAVES.items() if here == leaf), tensor, out)


@dataclass(frozen=True)
class MxFp4Stored:
    """Kept as it is."""

    name: str = "MXFP4"

    @property
    def kept(self) -> Scheme:
        """MXFP4."""
        return MxFp4()

    def tensors(self, rows: int, in_features: int) -> tuple[DiskTensor, ...]:
        """Scales, then codes."""
        scales = (rows, -(-in_features // MX_BLOCK))
        return (
            DiskTensor("weight_scale", (scales,), (DType.F8_E8M0,), "weight_scale", as_is=True),
            DiskTensor("weight", ((rows, -(-in_features // 2)),), (DType.U8,), "weight", as_is=True),
        )

    def place(self, leaf: str, tensor: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """Bytes, where a tensor does not come in runs of rows."""
        out[leaf].copy_(tensor)


@dataclass(frozen=True)
class Int8Rows:
    """Symmetric int8: zero points, where there are any, are zeros, which is seen when they come."""

    name: str = "torchao Int8Tensor"

    @property
    def kept(self) -> Scheme:
        """A scale for each row."""
        return Int8PerChannel()

    def tensors(self, rows: int, in_features: int) -> tuple[DiskTensor, ...]:
        """Scales of each row, or one for all, then codes."""
        shapes = ((rows, 1), (rows,), (1, 1), (1,), ())
        return (
            DiskTensor(_ZERO, shapes, (DType.I8, DType.I32, DType.I64), "weight_scale", optional=True),
            DiskTensor(_SCALE, shapes, FLOATS, "weight_scale"),
            DiskTensor(_CODES, ((rows, in_features),), (DType.I8,), "weight", as_is=True),
        )

    def place(self, leaf: str, tensor: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """QuantError for zero points that are not zero."""
        if leaf == _ZERO:
            if tensor.any():
                raise QuantError("its int8 codes have zero points that are not 0, which cannot be read")
        elif leaf == _SCALE:
            out["weight_scale"].copy_(tensor.reshape(-1))
        else:
            out["weight"].copy_(tensor)


@dataclass(frozen=True)
class IntGroupsUnpacked:
    """A signed code a byte, kept unsigned and packed: 4 bits where those are enough, else 8."""

    kept: IntPerGroup
    name: str = "torchao IntxUnpackedToInt8Tensor"

    def tensors(self, rows: int, in_features: int) -> tuple[DiskTensor, ...]:
        """Scales and zero points of groups, then codes."""
        groups = (rows, -(-in_features // (self.kept.group_size or max(1, in_features))))
        return (
            DiskTensor(_ZERO, (groups,), (DType.I8,), "weight_zero_point"),
            DiskTensor(_SCALE, (groups,), (self.kept.scale_dtype,), "weight_scale", as_is=True),
            DiskTensor(_CODES, ((rows, in_features),), (DType.I8,), "weight"),
        )

    def place(self, leaf: str, tensor: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """code and zero point + 8 (128 with 8 bits); QuantError for what needs more bits than are stated."""
        from quant.int4_codec import store_codes

        if leaf == _SCALE:
            out["weight_scale"].copy_(tensor)
            return
        if self.kept.bits == 4 and tensor.numel() and (int(tensor.min()) < -8 or int(tensor.max()) > 7):
            raise QuantError("its codes are said to have at most 4 bits, and have more")
        if leaf == _ZERO:
            out["weight_zero_point"].copy_(self._unsigned(tensor))
        else:
            for codes, kept in zip(tensor.split(_RUN_ROWS), out["weight"].split(_RUN_ROWS), strict=True):
                store_codes(self._unsigned(codes), kept, bits=self.kept.bits)

    def _unsigned(self, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        return tensor.view(torch.uint8) + self.kept.zero  # bytes wrap round


@dataclass(frozen=True)
class TorchAoMethod:
    """`described`: what the headers' metadata says of each weight, by its name."""

    described: Mapping[str, Mapping[str, Any]]
    ignore: tuple[str, ...] = ()
    name: str = "torchao"

    def form_of(self, module: str, found: Mapping[str, FoundTensor], shape: tuple[int, int]) -> DiskForm | None:
        """By the class and its attributes."""
        if _CODES not in found:
            return None
        stated = self.described.get(f"{module}.weight", {})
        kind, data = str(stated.get("_type"))[:60], stated.get("_data")
        if kind not in _FORMS or not isinstance(data, Mapping):
            raise QuantError(f"its weight is a torchao {kind}: {', '.join(_FORMS)} can be read")
        if data.get("is_swizzled_scales"):
            raise QuantError(f"the scales of its {kind} are swizzled for one kind of device")
        if _SCALE not in found:
            raise QuantError(f"its weight is a torchao {kind}, but it has no {_SCALE}")
        return _FORMS[kind](data, found, shape)

    def excludes(self, module: str) -> bool:
        """By the configuration's list."""
        return any_matches(self.ignore, module)


def torchao_method(config: Mapping[str, Any]) -> TorchAoMethod:
    """The method of a quantization_config that the headers' metadata has been added to. Raises QuantError for what
    cannot be read."""
    return TorchAoMethod(config[DESCRIBED], ignored_modules(config, "modules_to_not_convert"))


# --- classes: (attributes, tensors that are there, shape of the weight) -> form


def _float8(data: Mapping[str, Any], found: Mapping[str, FoundTensor], shape: tuple[int, int]) -> DiskForm:
    height, width = block = _block(data, shape)
    kept: Scheme = Fp8PerBlock(block=block)
    if width == shape[1] and height in (1, shape[0]):
        kept = Fp8PerChannel() if height == 1 else Fp8PerTensor()
    return Renamed(Fp8OnDisk(kept, "weight_scale"), "torchao Float8Tensor")


def _int8(data: Mapping[str, Any], found: Mapping[str, FoundTensor], shape: tuple[int, int]) -> DiskForm:
    if (block := _block(data, shape)) not in ((1, shape[1]), shape):
        raise QuantError(
            f"its int8 codes have scales for blocks of {list(block)}; rows or the whole weight can be read"
        )
    return Int8Rows()


def _intx(data: Mapping[str, Any], found: Mapping[str, FoundTensor], shape: tuple[int, int]) -> DiskForm:
    target = data.get("target_dtype")
    name = target.get("_data") if isinstance(target, Mapping) else None
    bits = next((bits for bits in range(1, 9) if name == f"int{bits}"), None)
    height, width = _block(data, shape)
    if bits is None or height != 1 or found[_SCALE].dtype not in FLOATS:
        raise QuantError(
            f"its codes are {str(name)[:60]} in blocks of {[height, width]}: int1 to int8 in groups of a row"
        )
    group = 0 if width == shape[1] else width
    return IntGroupsUnpacked(
        IntPerGroup(4 if bits <= 4 else 8, group, symmetric=False, scale_dtype=found[_SCALE].dtype)
    )


def _mx(data: Mapping[str, Any], found: Mapping[str, FoundTensor], shape: tuple[int, int]) -> DiskForm:
    element = data.get("elem_dtype")
    name, size = element.get("_data") if isinstance(element, Mapping) else None, data.get("block_size")
    forms: dict[Any, DiskForm] = {
        "float8_e4m3fn": Fp8OnDisk(MxFp8(), "weight_scale"), "float4_e2m1fn_x2": MxFp4Stored(),
    }  # fmt: skip
    if name not in forms or size != MX_BLOCK:
        raise QuantError(f"its MXTensor is {str(name)[:60]} in blocks of {str(size)[:60]}: {', '.join(forms)} of 32")
    return Renamed(forms[name], "torchao MXTensor")


def _nvfp4(data: Mapping[str, Any], found: Mapping[str, FoundTensor], shape: tuple[int, int]) -> DiskForm:
    if data.get("block_size") != NV_BLOCK:
        raise QuantError(f"its NVFP4Tensor has blocks of {str(data.get('block_size'))[:60]}, not {NV_BLOCK}")
    inner = NvFp4OnDisk(whole=_WHOLE in found)
    inner.tensors(*shape)
    return Renamed(inner, "torchao NVFP4Tensor")


_Read = Callable[[Mapping[str, Any], Mapping[str, FoundTensor], tuple[int, int]], DiskForm]
_FORMS: Mapping[str, _Read] = {
    "Int8Tensor": _int8, "IntxUnpackedToInt8Tensor": _intx, "Float8Tensor": _float8, "MXTensor": _mx,
    "NVFP4Tensor": _nvfp4,
}  # fmt: skip


def _block(data: Mapping[str, Any], shape: tuple[int, int]) -> tuple[int, int]:
    size = data.get("block_size")
    if not isinstance(size, list) or len(size) != 2 or not all(type(one) is int and one > 0 for one in size):
        raise QuantError(f"block_size {str(size)[:60]}: two numbers are needed for a weight of {list(shape)}")
    return size[0], size[1]

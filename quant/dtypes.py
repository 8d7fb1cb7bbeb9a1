"""The dtypes of checkpoints and parameters, as a small enum that needs no torch (the planning path imports none)."""

from __future__ import annotations

from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class DType(Enum):
    """A numeric type; the value is its name in safetensors headers."""

    F64 = "F64"
    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    F8_E4M3 = "F8_E4M3"
    F8_E4M3FNUZ = "F8_E4M3FNUZ"
    F8_E5M2 = "F8_E5M2"
    F8_E8M0 = "F8_E8M0"
    I64 = "I64"
    I32 = "I32"
    I16 = "I16"
    I8 = "I8"
    U64 = "U64"
    U32 = "U32"
    U16 = "U16"
    U8 = "U8"
    BOOL = "BOOL"
    C64 = "C64"

    @cached_property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]

    @property
    def is_float(self) -> bool:
        """Whether this is a floating-point type that weights are computed in or stored in."""
        return self.value.startswith(("F", "BF"))

    @property
    def in_files(self) -> bool:
        """Whether checkpoints may hold it. e4m3fnuz is only what some devices make of e4m3 (see quant.fnuz)."""
        return self is not DType.F8_E4M3FNUZ

    @cached_property
    def is_wide(self) -> bool:
        """Whether a matmul can run in this type: float16, bfloat16, float32, float64."""
        return self in (DType.F64, DType.F32, DType.F16, DType.BF16)

    @property
    def torch_name(self) -> str:
        """The attribute of the torch module that is this dtype, such as "bfloat16"."""
        return _TORCH_NAME[self]


_ITEMSIZE = {
    DType.F64: 8, DType.F32: 4, DType.F16: 2, DType.BF16: 2, DType.F8_E4M3: 1, DType.F8_E5M2: 1, DType.F8_E8M0: 1,
    DType.F8_E4M3FNUZ: 1, DType.I64: 8, DType.I32: 4, DType.I16: 2, DType.I8: 1, DType.U64: 8, DType.U32: 4,
    DType.U16: 2, DType.U8: 1, DType.BOOL: 1, DType.C64: 8,
}  # fmt: skip

_TORCH_NAME = {
    DType.F64: "float64", DType.F32: "float32", DType.F16: "float16", DType.BF16: "bfloat16",
    DType.F8_E4M3: "float8_e4m3fn", DType.F8_E5M2: "float8_e5m2", DType.F8_E8M0: "float8_e8m0fnu",
    DType.F8_E4M3FNUZ: "float8_e4m3fnuz",
    DType.I64: "int64", DType.I32: "int32", DType.I16: "int16", DType.I8: "int8",
    DType.U64: "uint64", DType.U32: "uint32", DType.U16: "uint16", DType.U8: "uint8", DType.BOOL: "bool",
    DType.C64: "complex64",
}  # fmt: skip


def to_torch(dtype: DType) -> torch.dtype:
    """The torch dtype of the same meaning (imports torch)."""
    import torch

    found = getattr(torch, dtype.torch_name)
    assert isinstance(found, torch.dtype)
    return found


def from_torch(dtype: torch.dtype) -> DType:
    """Our name of a torch dtype."""
    name = str(dtype).removeprefix("torch.")
    return next(ours for ours, theirs in _TORCH_NAME.items() if theirs == name)

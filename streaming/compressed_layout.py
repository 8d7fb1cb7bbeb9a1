"""What the compressed-tensors layout calls a weight's stored tensors, and in which form it wants each. [no-torch]

https://github.com/vllm-project/compressed-tensors: a quantized module `m` holds `m.weight` or `m.weight_packed`,
`m.weight_scale` and what its strategy needs besides, and config.json says strategy and bits (QuantizationArgs). The
numbers are those of the scheme; only shapes, names and the packing of 4-bit codes differ:

    4-bit integers    32-bit words along a row, the first code lowest: the kept bytes, a row filled up to whole words
    zero points       the same along the rows of a column: [ceil(O / 8), groups]
    E8M0 scales       their codes as U8
    nvfp4             the global scale divides there: its reciprocal

O out_features, I in_features of one module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from quant.dtypes import DType
from quant.int4 import IntPerGroup
from quant.scheme import Scheme, StoredSpec
from streaming.errors import OptionError

_CODES_A_WORD = 8  # 4-bit codes in an I32


class Form(Enum):
    """What is done to a stored tensor."""

    SAME = "same"
    COLUMN = "column"  # [O] -> [O, 1]
    WORDS = "words"  # U8 [O, bytes] -> I32 [O, words]
    COLUMN_WORDS = "column words"  # U8 [O, groups], a code each -> I32 [ceil(O / 8), groups]
    BYTES = "bytes"  # any dtype of one byte -> U8
    RECIPROCAL = "reciprocal"  # F32
    EXACT = "exact"  # in a dtype in which code x scale is exact enough to be rounded once: see `exact_dtype`
    SHAPE = "shape"  # I64 [2]: O and I


@dataclass(frozen=True)
class Written:
    """One tensor of a module: its name there, the stored tensor that it is made of ("" for none), and how."""

    name: str
    source: str
    form: Form = Form.SAME


@dataclass(frozen=True)
class Layout:
    """How one scheme is written. `weights`: its QuantizationArgs in config.json.

    `row_multiple`: a module of several sections can be written where each but the last has a multiple of so many rows;
    0 where it cannot. `columns`: I must be a multiple of it.
    """

    format: str
    weights: Mapping[str, Any] = field(hash=False)
    written: tuple[Written, ...]
    row_multiple: int = 1
    columns: int = 1

    def group(self, targets: list[str]) -> dict[str, Any]:
        """The config group of the modules that `targets` names."""
        rest = {"input_activations": None, "output_activations": None, "format": self.format}
        return {"targets": targets, "weights": dict(self.weights), **rest}


def _args(bits: int, kind: str, strategy: str, **more: object) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **more}


_CODES = Written("weight", "weight")
_ROW_SCALES = (_CODES, Written("weight_scale", "weight_scale", Form.COLUMN))
_TENSOR_SCALES = (_CODES, Written("weight_scale", "weight_scale"))
_MX_SCALES = Written("weight_scale", "weight_scale", Form.BYTES)
_MX = {"group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
_FP4 = Written("weight_packed", "weight")
_NVFP4_SCALES = (
    Written("weight_scale", "weight_scale"), Written("weight_global_scale", "weight_global_scale", Form.RECIPROCAL),
)  # fmt: skip
_E4M3 = "torch.float8_e4m3fn"
_LAYOUTS: Mapping[str, Layout] = {
    "fp8_per_tensor": Layout("float-quantized", _args(8, "float", "tensor"), _TENSOR_SCALES, row_multiple=0),
    "fp8_per_channel": Layout("float-quantized", _args(8, "float", "channel"), _ROW_SCALES),
    "fp8_per_block": Layout(
        "float-quantized", _args(8, "float", "block", block_structure=[128, 128]), _TENSOR_SCALES, row_multiple=128
    ),
    "int8_per_channel": Layout("int-quantized", _args(8, "int", "channel"), _ROW_SCALES),
    "mxfp8": Layout("mxfp8-quantized", _args(8, "float", "group", **_MX), (_CODES, _MX_SCALES), columns=32),
    "mxfp4": Layout("mxfp4-pack-quantized", _args(4, "float", "group", **_MX), (_FP4, _MX_SCALES), columns=32),
    "nvfp4": Layout(
        "nvfp4-pack-quantized",
        _args(4, "float", "tensor_group", group_size=16, scale_dtype=_E4M3, zp_dtype=_E4M3),
        (_FP4, *_NVFP4_SCALES),
        row_multiple=0,
        columns=16,
    ),
}
SAVED = (*_LAYOUTS, "int4_per_group")


def layout_of(scheme: Scheme) -> Layout:
    """The layout of a scheme. Raises OptionError, with those that there are, for one that has none."""
    found = _LAYOUTS.get(scheme.name)
    if isinstance(scheme, IntPerGroup) and scheme.bits == 4 and scheme.group_size and not scheme.ordered:
        found = _int4_layout(scheme)
    if found is None:
        raise OptionError(
            f"--quantization {scheme.name}: has no form in the compressed-tensors layout; these have one: "
            f"{', '.join(SAVED)}"
        )
    return found


def _int4_layout(scheme: IntPerGroup) -> Layout:
    size, symmetric = scheme.group_size, scheme.symmetric
    args = _args(4, "int", "group", group_size=size) | {"symmetric": symmetric}
    zeros = () if symmetric else (Written("weight_zero_point", "weight_zero_point", Form.COLUMN_WORDS),)
    written = (
        Written("weight_packed", "weight", Form.WORDS), Written("weight_scale", "weight_scale", Form.EXACT), *zeros,
        Written("weight_shape", "", Form.SHAPE),
    )  # fmt: skip
    return Layout("pack-quantized", args, written, columns=size)


def exact_dtype(scale: DType, wide: DType) -> DType:
    """The dtype in which scales of group-wise integers are written: readers multiply in it, and only then convert.

    In the model's own dtype that is one rounding; in another one it would be two, so float32 is written then.
    """
    return scale if scale is wide else DType.F32


def written_spec(
    form: Form, stored: Mapping[str, StoredSpec], source: str, *, rows: int, in_features: int, wide: DType
) -> StoredSpec:
    """Shape and dtype of a written tensor, from what the scheme stores for a module [rows, in_features]."""
    if form is Form.SHAPE:
        return StoredSpec((2,), DType.I64)
    spec = stored[source]
    if form is Form.COLUMN:
        return StoredSpec((rows, 1), spec.dtype)
    if form is Form.WORDS:
        return StoredSpec((rows, -(-in_features // _CODES_A_WORD)), DType.I32)
    if form is Form.COLUMN_WORDS:
        return StoredSpec((-(-rows // _CODES_A_WORD), spec.shape[1]), DType.I32)
    if form is Form.BYTES:
        return StoredSpec(spec.shape, DType.U8)
    return StoredSpec(spec.shape, exact_dtype(spec.dtype, wide)) if form is Form.EXACT else spec

"""AWQ on disk: integers of 4 bits in groups of inputs, in the two layouts that AutoAWQ writes.

number = (code - zero) * scale, with G = I / group_size groups of a weight of O outputs and I inputs.

- "gemm": `qweight` int32 [I, O/8] and `qzeros` int32 [G, O/8] hold eight neighbouring outputs in a word, in the order
  0, 2, 4, 6, 1, 3, 5, 7; `scales` [G, O].
- "gemv": `qweight` int32 [O, I/8], `qzeros` int32 [O, Z], `scales` [O, 8 Z], each in plain order, lowest bits first.
  Z is G / 8, rounded up to 1, to 2 with groups of 64, to 4 with groups of 32; what is beyond G is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quant.disk_forms.form import DiskForm, DiskTensor, FoundTensor
from quant.disk_forms.scales import FLOATS, float_dtype
from quant.disk_forms.settings import LARGEST, ignored_modules, whole_number, word
from quant.dtypes import DType
from quant.errors import QuantError
from quant.int4 import IntPerGroup
from quant.module_patterns import any_matches

if TYPE_CHECKING:
    import torch

LAYOUTS = ("gemm", "gemv")
_BITS = 4
_IN_WORD = 32 // _BITS
_ZERO_WORDS = {64: 2, 32: 4}  # the multiple of words that a row of zero points has in "gemv", by group size


@dataclass(frozen=True)
class AwqOnDisk:
    """`group_size` 0: one group for all inputs."""

    layout: str
    group_size: int
    scale_dtype: DType

    @property
    def name(self) -> str:
        """What it is called in messages."""
        size = f"groups of {self.group_size}" if self.group_size else "one group"
        return f"AWQ ({self.layout}), {_BITS} bits in {size}"

    @property
    def kept(self) -> IntPerGroup:
        """Codes, scales and zero points as they are, in another order."""
        return IntPerGroup(
            bits=_BITS, group_size=self.group_size, symmetric=False, scale_dtype=self.scale_dtype
        )  # fmt: skip

    def tensors(self, rows: int, in_features: int) -> tuple[DiskTensor, ...]:
        """Zero points, scales, codes."""
        groups = in_features // (self.group_size or max(1, in_features))
        if self.layout == "gemm":
            zeros, scales, codes = (groups, rows // _IN_WORD), (groups, rows), (in_features, rows // _IN_WORD)
        else:
            width = _zero_words(groups, self.group_size)
            zeros, scales, codes = (rows, width), (rows, _IN_WORD * width), (rows, in_features // _IN_WORD)
        return (
            DiskTensor("qzeros", (zeros,), (DType.I32,), "weight_zero_point"),
            DiskTensor("scales", (scales,), FLOATS, "weight_scale"),
            DiskTensor("qweight", (codes,), (DType.I32,), "weight"),
        )

    def place(self, leaf: str, tensor: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """Rows of "gemv" are kept rows; those of "gemm" are turned."""
        if self.layout == "gemm":
            _place_gemm(leaf, tensor, out)
        else:
            _place_gemv(leaf, tensor, out)


def _place_gemm(leaf: str, tensor: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
    from quant.disk_forms.packed_words import codes_of_words, in_output_order, keep_interleaved

    if leaf == "qweight":
        keep_interleaved(tensor, out["weight"])
    elif leaf == "scales":
        out["weight_scale"].copy_(tensor.t())
    else:
        zeros = codes_of_words(tensor, out["weight_zero_point"].shape[0], bits=_BITS)
        out["weight_zero_point"].copy_(in_output_order(zeros).t())


def _place_gemv(leaf: str, tensor: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
    import torch

    from quant.disk_forms.packed_words import codes_of_words

    if leaf == "qweight":
        out["weight"].copy_(tensor.contiguous().view(torch.uint8))
    elif leaf == "scales":
        out["weight_scale"].copy_(tensor[:, : out["weight_scale"].shape[1]])
    else:
        out["weight_zero_point"].copy_(codes_of_words(tensor, out["weight_zero_point"].shape[1], bits=_BITS))


def _zero_words(groups: int, group_size: int) -> int:
    multiple = _ZERO_WORDS.get(group_size, 1)
    return -(-groups // (_IN_WORD * multiple)) * multiple


@dataclass(frozen=True)
class AwqMethod:
    """A configuration of quant_method awq."""

    layout: str
    group_size: int
    ignore: tuple[str, ...] = ()
    name: str = "awq"

    def form_of(self, module: str, found: Mapping[str, FoundTensor], shape: tuple[int, int]) -> DiskForm | None:
        """What the tensors show: codes are `qweight`, and a wide weight stays wide."""
        if "qweight" not in found:
            return None
        if "weight" in found:
            raise QuantError("weight and qweight are both there")
        rows, in_features = shape
        if self.group_size and in_features % self.group_size:
            raise QuantError(f"its {in_features} inputs are not a multiple of group_size {self.group_size}")
        packed, size = ("outputs", rows) if self.layout == "gemm" else ("inputs", in_features)
        if size % _IN_WORD:
            raise QuantError(f"its {size} {packed} do not fill words of {_IN_WORD} codes")
        return AwqOnDisk(self.layout, self.group_size, float_dtype(found.get("scales")))

    def excludes(self, module: str) -> bool:
        """By the configuration's list."""
        return any_matches(self.ignore, module)


def awq_method(config: Mapping[str, Any]) -> AwqMethod:
    """The method of a quantization_config (or a quant_config.json). Raises QuantError for what cannot be read."""
    layout = word(config, "version", "checkpoint_format", "format", default="gemm")
    if layout not in LAYOUTS:
        raise QuantError(f"version {layout!r}: the layouts {' and '.join(LAYOUTS)} can be read")
    bits = whole_number(config, "bits", "w_bit")
    if bits != _BITS:
        raise QuantError(f"bits {bits}: AWQ weights of {_BITS} bits can be read")
    size = whole_number(config, "group_size", "q_group_size")
    if not -1 <= size <= LARGEST or size == 0:
        raise QuantError(f"group_size {str(size)[:20]}: a positive number to {LARGEST}, or -1 for one group, is needed")
    if layout == "gemv" and 0 < size < 128 and size not in _ZERO_WORDS:
        raise QuantError(f"group_size {size}: groups of 32, 64 and 128 or more are stored by version 'gemv'")
    return AwqMethod(layout, max(0, size), ignored_modules(config, "modules_to_not_convert"))

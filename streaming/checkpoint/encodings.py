"""GGUF's tensor types by number: which can be read, how large their blocks are, what the others are called. [no-torch]

Numbers and sizes are those of ggml (ggml/include/ggml.h, `enum ggml_type`, and ggml/src/ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from quant.dtypes import DType
from streaming.checkpoint.tensors import Encoding


@dataclass(frozen=True)
class GgmlType:
    """One tensor type: plain numbers (`encoding` None), or blocks that decode to float32."""

    name: str
    dtype: DType
    encoding: Encoding | None = None

    @property
    def block_values(self) -> int:
        """Values in one block; a row is a whole number of blocks."""
        return self.encoding.block_values if self.encoding else 1

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block."""
        return self.encoding.block_nbytes if self.encoding else self.dtype.itemsize


def _blocks(name: str, values: int, nbytes: int) -> GgmlType:
    return GgmlType(name, DType.F32, Encoding(name, values, nbytes))


READABLE: Mapping[int, GgmlType] = MappingProxyType(
    {
        0: GgmlType("F32", DType.F32),
        1: GgmlType("F16", DType.F16),
        30: GgmlType("BF16", DType.BF16),
        2: _blocks("Q4_0", 32, 18),
        3: _blocks("Q4_1", 32, 20),
        6: _blocks("Q5_0", 32, 22),
        7: _blocks("Q5_1", 32, 24),
        8: _blocks("Q8_0", 32, 34),
        10: _blocks("Q2_K", 256, 84),
        11: _blocks("Q3_K", 256, 110),
        12: _blocks("Q4_K", 256, 144),
        13: _blocks("Q5_K", 256, 176),
        14: _blocks("Q6_K", 256, 210),
    }
)

_OTHERS: Mapping[int, str] = MappingProxyType(
    {
        9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S",
        22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0",
        35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
    }
)  # fmt: skip


def type_name(number: int) -> str:
    """What ggml calls a type, readable here or not."""
    if number in READABLE:
        return READABLE[number].name
    return _OTHERS.get(number, f"number {number}")

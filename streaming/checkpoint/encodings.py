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
        28: GgmlType("F64", DType.F64),
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
        16: _blocks("IQ2_XXS", 256, 66),
        17: _blocks("IQ2_XS", 256, 74),
        18: _blocks("IQ3_XXS", 256, 98),
        19: _blocks("IQ1_S", 256, 50),
        20: _blocks("IQ4_NL", 32, 18),
        21: _blocks("IQ3_S", 256, 110),
        22: _blocks("IQ2_S", 256, 82),
        23: _blocks("IQ4_XS", 256, 136),
        29: _blocks("IQ1_M", 256, 56),
        34: _blocks("TQ1_0", 256, 54),
        35: _blocks("TQ2_0", 256, 66),
        39: _blocks("MXFP4", 32, 17),
        40: _blocks("NVFP4", 64, 36),
    }
)

_OTHERS: Mapping[int, str] = MappingProxyType(
    {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64"}
)  # of activations, and integers, which are no weights
# Not defined in the other byte order: ggml reads half of each of its words as bytes and half as a number.
LITTLE_ENDIAN_ONLY = frozenset({"IQ2_XXS"})


def type_name(number: int) -> str:
    """What ggml calls a type, readable here or not."""
    if number in READABLE:
        return READABLE[number].name
    return _OTHERS.get(number, f"number {number}")

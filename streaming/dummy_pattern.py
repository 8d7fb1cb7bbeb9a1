"""The endless patterns that made-up weights are runs of. [no-torch]

"random.BF16" repeats a block of P numbers, made of SHAKE-128's stream: sign and mantissa are random, the magnitude lies
from 2^-7 to 2^-5, so that logits stay finite. P is a prime larger than any row, so no two rows of a weight are equal.
"ones.BF16" is 1 and 1 and 1. Numbers stand in little-endian order, as in safetensors files.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence

from quant.dtypes import DType
from streaming.reading import Fill, FlatPiece
from streaming.strided_fill import write_runs

BLOCK_VALUES = 524_287  # the largest prime below 2**19: a block of bfloat16 numbers takes 1 MiB
_ONES = "ones"


def pattern_block(pattern: str) -> bytes:
    """The bytes that a pattern ("random.BF16", "ones.F32") repeats, numbers in little-endian order."""
    kind, _, name = pattern.partition(".")
    dtype = DType(name)
    if kind == _ONES:
        return _one(dtype) * BLOCK_VALUES
    size = dtype.itemsize
    block = bytearray(hashlib.shake_128(f"firstlayer dummy {name}".encode()).digest(BLOCK_VALUES * size))
    for lane, keep, put in _LANES[dtype]:
        block[lane::size] = block[lane::size].translate(bytes((byte & keep) | put for byte in range(256)))
    return bytes(block)


# (byte of a number, bits of it that stay random, bits that are set): the exponent of 2^-7 or 2^-6, the rest random
_LANES: Mapping[DType, tuple[tuple[int, int, int], ...]] = {
    DType.BF16: ((1, 0x80, 0x3C),),
    DType.F16: ((1, 0x87, 0x20),),
    DType.F32: ((3, 0x80, 0x3C),),
    DType.F64: ((7, 0x80, 0x3F), (6, 0x1F, 0x80)),
}


def _one(dtype: DType) -> bytes:
    if dtype is DType.BF16:
        return struct.pack("<f", 1.0)[2:]  # its upper half
    return struct.pack({DType.F16: "<e", DType.F32: "<f", DType.F64: "<d"}[dtype], 1.0)


def pattern_parts(block: bytes, offset: int, nbytes: int) -> Iterator[memoryview]:
    """The endless pattern's bytes [offset, offset + nbytes) as runs of the block."""
    source, end = memoryview(block), offset + nbytes
    while offset < end:
        begin = offset % len(block)
        part = source[begin : begin + end - offset]
        yield part
        offset += len(part)


def read_pattern(block: bytes, into: memoryview, offset: int) -> None:
    """Fill `into` with the endless pattern from byte `offset` on."""
    done = 0
    for part in pattern_parts(block, offset, len(into)):
        into[done : done + len(part)] = part
        done += len(part)


def fill_patterns(patterns: Iterable[str], regions: Sequence[memoryview]) -> Fill:
    """What `streaming.reading.fill_memory` does for files, given a pattern's number in place of a descriptor."""
    blocks = [pattern_block(pattern) for pattern in patterns]

    def fill(pattern: int, piece: FlatPiece) -> int:
        run = piece.run_nbytes or piece.nbytes
        for index in range(piece.nbytes // run if run else 0):
            start = piece.dest + index * run
            place = regions[piece.region][start : start + run]
            read_pattern(blocks[pattern], place, piece.offset + index * piece.stride_nbytes)
        return 0

    return fill


def fill_shared_patterns(patterns: Iterable[str], shared: Sequence[int]) -> Fill:
    """The same for shared memory, through its descriptors."""
    blocks = [pattern_block(pattern) for pattern in patterns]

    def fill(pattern: int, piece: FlatPiece) -> int:
        run = piece.run_nbytes or piece.nbytes
        starts = range(piece.offset, piece.offset + piece.span_nbytes, piece.stride_nbytes or max(1, run))
        parts = [part for start in starts for part in pattern_parts(blocks[pattern], start, run)]
        write_runs(shared[piece.region], parts, piece.dest)
        return 0

    return fill

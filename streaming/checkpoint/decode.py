"""From a tensor's bytes to its numbers: block encodings, byte order, and llama's interleaved rows put right.

R rows, C values in a row. Work goes in chunks of whole rows (of whole heads where rows are interleaved) that stay in
the processor's cache, so the temporary is small and the same memory is used again. torch is imported inside the
functions: the planning path imports this package too.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from quant.dtypes import DType, to_torch
from streaming.checkpoint.tensors import TensorInfo

if TYPE_CHECKING:
    import torch
    from _typeshed import ReadableBuffer
    from torch import Tensor

_CHUNK_VALUES = 1 << 18  # 1 MiB of float32: large enough to hide the cost of each call, small enough for the cache


def decode_rows(info: TensorInfo, raw: ReadableBuffer | Tensor, *, rows: tuple[int, int]) -> Tensor:
    """Rows [first, stop) of a tensor, a new tensor [R, ...]: float32 where it is encoded, else of its own dtype.

    `raw` holds exactly those rows' bytes as they are in the file. ValueError: see `decode_into`.
    """
    import torch

    first, stop = rows
    out = torch.empty((stop - first, *info.shape[1:]), dtype=to_torch(DType.F32 if info.encoding else info.dtype))
    decode_into(info, raw, out, first_row=first)
    return out


def decode_into(info: TensorInfo, raw: ReadableBuffer | Tensor, out: Tensor, *, first_row: int) -> None:
    """Decode a run of rows that begins at `first_row` into `out` [R, ...], rounding once where out is narrower.

    `raw`: the rows' bytes as they are in the file (any buffer, or a contiguous uint8 tensor). The temporary is at most
    a few MiB. ValueError where the bytes are not those of R rows, or where rows of interleaved heads are not whole
    heads (`info.row_unit`).
    """
    source = _as_bytes(raw)
    n_rows, unit = out.shape[0], info.row_unit
    if source.numel() != n_rows * info.row_nbytes:
        raise ValueError(
            f"tensor {info.name!r}: expected {n_rows} rows of {info.row_nbytes} bytes, found {source.numel()} bytes"
        )
    if first_row % unit or n_rows % unit:
        raise ValueError(
            f"tensor {info.name!r}: rows {first_row} to {first_row + n_rows} do not begin and end with "
            f"a head of {unit} rows"
        )
    row_values = prod(info.shape[1:])
    step = max(1, _CHUNK_VALUES // (row_values * unit)) * unit
    scratch = _scratch(info, min(step, n_rows) * row_values)
    for start in range(0, n_rows, step):
        stop = min(start + step, n_rows)
        chunk = source[start * info.row_nbytes : stop * info.row_nbytes]
        values = _values(info, chunk, scratch).view(stop - start, *info.shape[1:])
        out[start:stop].copy_(unpermute(values, heads=(stop - start) // unit) if info.rope_heads else values)


def unpermute(rows: Tensor, *, heads: int) -> Tensor:
    """Rows [heads * D, ...] as llama.cpp's converter leaves them, in Hugging Face's order; a view where possible.

    The converter (`LlamaModel.permute` in convert_hf_to_gguf.py) moves row s * D/2 + i of a head, s in (0, 1), to row
    2 i + s, so that the two numbers that a rotary embedding turns together are neighbours.
    """
    pairs = rows.view(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _scratch(info: TensorInfo, values: int) -> Tensor | None:
    """Float32 memory for one decoded chunk; plain numbers need none."""
    import torch

    return torch.empty(values, dtype=torch.float32) if info.encoding else None


def _values(info: TensorInfo, chunk: Tensor, scratch: Tensor | None) -> Tensor:
    """A chunk's bytes as numbers, one dim."""
    if info.encoding is None:
        return _plain(chunk, to_torch(info.dtype), big_endian=info.big_endian)
    from streaming.checkpoint.blocks import decode_blocks, swap_fields

    assert scratch is not None
    blocks = chunk.view(-1, info.encoding.block_nbytes)
    if info.big_endian:
        blocks = swap_fields(blocks, info.encoding.name)
    out = scratch[: blocks.shape[0] * info.encoding.block_values].view(blocks.shape[0], -1)
    decode_blocks(blocks, info.encoding.name, out)
    return out.view(-1)


def _plain(chunk: Tensor, dtype: torch.dtype, *, big_endian: bool) -> Tensor:
    if big_endian:
        chunk = chunk.view(-1, dtype.itemsize).flip(1).view(-1)
    return chunk.view(dtype)


def _as_bytes(raw: ReadableBuffer | Tensor) -> Tensor:
    """The bytes as a uint8 tensor, without a copy where the buffer is writable."""
    import torch

    if isinstance(raw, torch.Tensor):
        return raw.view(-1)
    view = memoryview(raw)
    if not view.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    # torch warns at each read-only buffer, since nothing would stop a write to it
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)

"""From a tensor's bytes to its numbers: block encodings, byte order, shifts, and llama's interleaved rows put right.

R rows, C values in a row. Work goes in chunks of whole rows (of whole heads where rows are interleaved) that stay in
the processor's cache, so the temporary is small and the same memory is used again. torch is imported inside the
functions: the planning path imports this package too.
"""

from __future__ import annotations

from math import gcd, prod
from typing import TYPE_CHECKING

from quant.dtypes import DType, to_torch
from streaming.checkpoint.tensors import TensorInfo

if TYPE_CHECKING:
    import torch
    from _typeshed import ReadableBuffer
    from torch import Tensor

_TURNED_COLUMNS = 64
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
    source = _source(raw)
    if info.strides is not None:
        _decode_strided(info, source, out)
        return
    n_rows, unit, row_nbytes = out.shape[0], info.row_unit, info.row_nbytes
    if len(source) != n_rows * row_nbytes:
        raise ValueError(
            f"tensor {info.name!r}: expected {n_rows} rows of {row_nbytes} bytes, found {len(source)} bytes"
        )
    if first_row % unit or n_rows % unit:
        raise ValueError(
            f"tensor {info.name!r}: rows {first_row} to {first_row + n_rows} do not begin and end with "
            f"a head of {unit} rows"
        )
    row_values = prod(info.shape[1:])
    step = max(1, _CHUNK_VALUES // (row_values * unit)) * unit
    scratch = _scratch(info, min(step, n_rows) * row_values, source)
    for start in range(0, n_rows, step):
        stop = min(start + step, n_rows)
        chunk = _chunk(source, start * row_nbytes, stop * row_nbytes, alignment=gcd(row_nbytes, 4))
        values = _values(info, chunk, scratch).view(stop - start, *info.shape[1:])
        if info.shift:
            values = _shifted(values, info.shift)
        if info.rope_heads:
            heads = (stop - start) // unit
            out[start:stop].view(heads, 2, unit // 2, *info.shape[1:]).copy_(_halves(values, heads))
        else:
            out[start:stop].copy_(values)


def _shifted(values: Tensor, shift: float) -> Tensor:
    """Numbers with something added, in float32 at least: they are rounded once, where they are written."""
    import torch

    return values.to(torch.promote_types(values.dtype, torch.float32)) + shift


def _decode_strided(info: TensorInfo, source: memoryview | Tensor, out: Tensor) -> None:
    """The whole of a tensor whose rows are no runs of bytes (a transposed one, a view that was saved as it was)."""
    assert info.strides is not None
    assert not info.shift
    if len(source) != info.nbytes or tuple(out.shape) != info.shape:
        raise ValueError(
            f"tensor {info.name!r}: {list(info.shape)} of {info.nbytes} bytes is read whole, "
            f"found {list(out.shape)} of {len(source)} bytes"
        )
    chunk = _chunk(source, 0, len(source), alignment=info.dtype.itemsize)
    numbers = _plain(chunk, to_torch(info.dtype), big_endian=info.big_endian)
    rows = numbers.as_strided(info.shape, info.strides)
    if not info.rope_heads:
        out.copy_(rows)
        return
    for head, halves in zip(
        out.view(info.rope_heads, 2, -1, *info.shape[1:]), _halves(rows, info.rope_heads), strict=True
    ):
        for target, half in zip(head, halves, strict=True):
            _turn(half, target)


def _turn(source: Tensor, out: Tensor) -> None:
    """Copy a matrix whose columns lie behind each other, some columns at a time: twice as fast as all at once."""
    if source.dim() != 2 or source.stride(0) > source.stride(1):
        out.copy_(source)
        return
    for first in range(0, source.shape[1], _TURNED_COLUMNS):
        columns = slice(first, first + _TURNED_COLUMNS)
        out[:, columns].copy_(source[:, columns].t().contiguous().t())


def unpermute(rows: Tensor, *, heads: int) -> Tensor:
    """Rows [heads * D, ...] as llama.cpp's converter leaves them, in Hugging Face's order; a new tensor.

    The converter (`LlamaModel.permute` in convert_hf_to_gguf.py) moves row s * D/2 + i of a head, s in (0, 1), to row
    2 i + s, so that the two numbers that a rotary embedding turns together are neighbours.
    """
    return _halves(rows, heads).reshape(rows.shape)


def _halves(rows: Tensor, heads: int) -> Tensor:
    """The same rows as [heads, 2, D/2, ...], a view: first halves of the pairs, then second halves."""
    return rows.view(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).transpose(1, 2)


def _scratch(info: TensorInfo, values: int, source: memoryview | Tensor) -> Tensor | None:
    """Float32 memory for one decoded chunk, where its bytes are; plain numbers need none."""
    import torch

    device = source.device if isinstance(source, torch.Tensor) else "cpu"
    return torch.empty(values, dtype=torch.float32, device=device) if info.encoding else None


def _source(raw: ReadableBuffer | Tensor) -> memoryview | Tensor:
    """The bytes, one dim."""
    import torch

    return raw.view(-1).view(torch.uint8) if isinstance(raw, torch.Tensor) else memoryview(raw).cast("B")


def _chunk(source: memoryview | Tensor, begin: int, end: int, *, alignment: int) -> Tensor:
    """A run of the bytes as a uint8 tensor whose fields can be viewed in their own dtypes.

    Copied where a tensor's part begins between two of those, and where nothing may write, which torch would warn of.
    """
    import torch

    if isinstance(source, torch.Tensor):
        run = source[begin:end]
        return run.clone() if run.storage_offset() % alignment else run
    part = source[begin:end]
    return torch.frombuffer(bytearray(part) if part.readonly else part, dtype=torch.uint8)


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

"""FP8 in blocks of 128 x 128: one float32 scale for each, the last ones of a weight smaller where its sizes are odd."""

from __future__ import annotations

import torch

from quant.float8_codec import scale_of, widened
from quant.panels import Workspace

BLOCK = 128


def encode_blocks(weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """Fill scale [ceil(R/128), ceil(I/128)] and out [R, I] from a wide [R, I], one row of blocks after the other."""
    workspace = Workspace()
    for index in range(scale.shape[0]):
        rows = slice(index * BLOCK, min((index + 1) * BLOCK, weight.shape[0]))
        part = weight[rows]
        scale[index].copy_(scale_of(block_row_amax(part, workspace)))
        out[rows].copy_(divide_blocks(widened(part, workspace), scale[index]))


def block_row_amax(part: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """float32 [ceil(I/128)]: the largest magnitude of each block of a wide [at most 128, I]; NaN where it holds one.

    Columns first, on the bits as integers (see float8_codec.row_amax).
    """
    integer = {2: torch.int16, 4: torch.int32}.get(part.element_size())
    if part.device.type != "cpu" or integer is None:
        columns = part.abs().amax(0).float()
    else:
        bits = workspace.take("block amax", tuple(part.shape), integer)
        torch.bitwise_and(part.view(integer), (1 << (8 * part.element_size() - 1)) - 1, out=bits)
        columns = bits.amax(0).view(part.dtype).float()
    whole = columns.shape[0] // BLOCK * BLOCK
    blocks = [columns[:whole].view(-1, BLOCK).amax(1)] if whole else []
    return torch.cat([*blocks, columns[whole:].amax().view(1)] if whole < columns.shape[0] else blocks)


def divide_blocks(wide: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """wide [r, I] divided in place by scale [ceil(I/128)], each for 128 columns."""
    return _apply(wide, scale, divide=True)


def multiply_blocks(wide: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """wide [r, I] multiplied in place by scale [ceil(I/128)], each for 128 columns."""
    return _apply(wide, scale, divide=False)


def _apply(wide: torch.Tensor, scale: torch.Tensor, *, divide: bool) -> torch.Tensor:
    whole = wide.shape[1] // BLOCK
    blocks = wide[:, : whole * BLOCK].view(wide.shape[0], whole, BLOCK) if whole else wide[:, :0]
    rest = wide[:, whole * BLOCK :]
    if whole:
        factor = scale[:whole].view(1, whole, 1)
        _ = blocks.div_(factor) if divide else blocks.mul_(factor)
    if rest.shape[1]:
        _ = rest.div_(scale[whole]) if divide else rest.mul_(scale[whole])
    return wide


def scale_by_number(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The scale of every number of a weight of this shape: float32 [R, I]."""
    rows = scale.repeat_interleave(BLOCK, 0)[: shape[0]]
    return rows.repeat_interleave(BLOCK, 1)[:, : shape[1]]

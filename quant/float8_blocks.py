"""FP8 in blocks of 128 x 128: one float32 scale for each, the last ones of a weight smaller where its sizes are odd."""

from __future__ import annotations

import torch

from quant.float8 import BLOCK
from quant.float8_codec import FLOAT8, LARGEST
from quant.magnitudes import group_magnitudes, magnitude_bits, strips
from quant.panels import Workspace
from quant.row_codec import scale_of, widened

_BLOCKS_AT_ONCE = 16  # when they are ordered: what is held for them stays small


def encode_blocks(
    weight: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, *, percentile: float | None = None
) -> None:
    """Fill scale [ceil(R/128), ceil(I/128)] and out [R, I] from a wide [R, I]."""
    workspace, rows = Workspace(), [(row, row + BLOCK) for row in range(0, weight.shape[0], BLOCK)]
    for index, (start, stop) in enumerate(rows):
        scale[index] = block_row_magnitudes(weight[start:stop], workspace, percentile=percentile)
    scale.copy_(scale_of(scale, largest=LARGEST))
    write = FLOAT8.write(weight, scale, within=percentile is None, rows=BLOCK)
    for index, (start, stop) in enumerate(rows):
        columns = scale[index].unsqueeze(1).expand(-1, BLOCK).reshape(-1)[: weight.shape[1]]
        part, codes = weight[start:stop], out[start:stop]
        for first, last in strips(part):
            write(widened(part[first:last], workspace), columns, codes[first:last])


def block_row_magnitudes(part: torch.Tensor, workspace: Workspace, *, percentile: float | None = None) -> torch.Tensor:
    """float32 [ceil(I/128)]: the magnitude of each block of a wide [at most 128, I] (see quant.magnitudes)."""
    if percentile is not None:
        return _ordered_magnitudes(part, workspace, percentile=percentile)
    bounds = strips(part)
    columns = magnitude_bits(part[: bounds[0][1]], workspace).amax(0)
    for start, stop in bounds[1:]:
        torch.maximum(columns, magnitude_bits(part[start:stop], workspace).amax(0), out=columns)
    if pad := -columns.shape[0] % BLOCK:
        columns = torch.nn.functional.pad(columns, (0, pad))  # zeros, which no magnitude is below
    blocks = columns.view(-1, BLOCK).amax(1)
    return blocks.view(part.dtype if part.element_size() == blocks.element_size() else torch.float32).float()


def _ordered_magnitudes(part: torch.Tensor, workspace: Workspace, *, percentile: float) -> torch.Tensor:
    """The same at a percentile: the numbers of each block in a row of their own."""
    whole, step = part.shape[1] // BLOCK * BLOCK, _BLOCKS_AT_ONCE * BLOCK
    found = []
    for start, stop in (*((a, min(whole, a + step)) for a in range(0, whole, step)), (whole, part.shape[1])):
        if start < stop:
            bits = magnitude_bits(part[:, start:stop], workspace)
            groups = bits.view(bits.shape[0], -1, min(BLOCK, stop - start)).transpose(0, 1).flatten(1)
            found.append(group_magnitudes(groups, part.dtype, percentile=percentile))
    return torch.cat(found) if found else torch.zeros(0, device=part.device)


def scale_by_number(scale: torch.Tensor, shape: torch.Size, *, block: tuple[int, int] = (BLOCK, BLOCK)) -> torch.Tensor:
    """The scale of every number of a weight of this shape: float32 [R, I]. A block may be larger than the weight."""
    rows = scale.repeat_interleave(min(block[0], shape[0]), 0)[: shape[0]]
    return rows.repeat_interleave(min(block[1], shape[1]), 1)[:, : shape[1]]

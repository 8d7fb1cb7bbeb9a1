"""Codes for 16 numbers as strips of wide numbers, for products that multiply strip by strip (see quant.nf4)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache

import torch

from quant.mx_codec import multiply_blocks
from quant.nf4 import NUMBERS, Nf4
from quant.panels import Workspace


@dataclass(frozen=True)
class CodedBlocks:
    """A section's stored tensors: weight uint8 [O, I / 2], scale float32 [ceil(O / span), span * I / block]."""

    weight: torch.Tensor
    scale: torch.Tensor
    form: Nf4

    def widen(self, start: int, stop: int, out: torch.Tensor, workspace: Workspace) -> None:
        """Write rows [start, stop) into a wide strip [stop - start, I] on the CPU."""
        single = out.dtype == torch.float32
        wide = out if single else workspace.take("coded", tuple(out.shape), torch.float32)
        codes = self.weight[start:stop]
        indices = workspace.take("codes", tuple(codes.shape), torch.int32).copy_(codes)
        torch.index_select(_pairs(self.form.numbers), 0, indices.view(-1), out=wide.view(torch.int64).view(-1))
        self._multiply(wide, start, stop)
        if not single:
            out.copy_(wide)

    def numbers(self, start: int, stop: int) -> torch.Tensor:
        """float32 rows [start, stop), on any device."""
        codes = self.weight[start:stop]
        pairs = _pairs(self.form.numbers).to(codes.device).index_select(0, codes.reshape(-1).int())
        wide = pairs.view(torch.float32).view(codes.shape[0], 2 * codes.shape[1])
        self._multiply(wide, start, stop)
        return wide

    def _multiply(self, wide: torch.Tensor, start: int, stop: int) -> None:
        span, block, columns = self.form.span, self.form.block, wide.shape[1]
        if span == 1:
            multiply_blocks(wide, self.scale[start:stop], block=block)
            return
        first = start // span
        scales = self.scale[first : -(-stop // span)].flatten().repeat_interleave(block)
        skipped = (start - first * span) * columns
        wide.mul_(scales[skipped : skipped + wide.numel()].view(wide.shape))


def _pairs(kind: str) -> torch.Tensor:
    """The two float32 numbers of every byte, high nibble first, as one int64 [256]: one look-up gives both."""
    return torch.frombuffer(bytearray(_packed_pairs(kind)), dtype=torch.int64)


@lru_cache(maxsize=len(NUMBERS))
def _packed_pairs(kind: str) -> bytes:
    """Made once for a kind: it takes longer than a small product, of which there is one for each weight and token."""
    table = NUMBERS[kind]
    return struct.pack("=512f", *(number for byte in range(256) for number in (table[byte >> 4], table[byte & 15])))

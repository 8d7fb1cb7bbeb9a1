"""Grouped integer codes as strips of wide numbers, for products that multiply strip by strip. R rows, I inputs.

By integer operations on whole words: a table of 256 pairs of numbers is three times slower. Scales are applied in
float32, where (code - zero) * scale is exact for scales of bfloat16 and float16; a strip in bfloat16 is that, rounded
once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quant.int4_codec import NIBBLES, SPREAD, codes_of, decode, group_spans
from quant.panels import Workspace


@dataclass(frozen=True)
class IntGroups:
    """A weight's stored tensors: weight uint8 [O, ceil(I/2)] (4 bits) or [O, I], scale [O, G], zero uint8 [O, G] or
    the same for all; group: the size of a group (0: the whole row), or the group of each input, int32 [I]."""

    weight: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | int
    group: torch.Tensor | int
    bits: int

    def widen(self, start: int, stop: int, out: torch.Tensor, workspace: Workspace) -> None:
        """Write rows [start, stop) into a wide strip [stop - start, I] on the CPU."""
        single = out.dtype == torch.float32
        wide = out if single else workspace.take("groups", tuple(out.shape), torch.float32)
        self._write_codes(self.weight[start:stop], wide, workspace)
        rows = (self.scale[start:stop], None if isinstance(self.zero, int) else self.zero[start:stop])
        if isinstance(self.group, int):
            _apply_by_span(wide, *rows, self.group)
        else:
            _apply_in_order(wide, *rows, self.group)
        if not single:
            out.copy_(wide)

    def on_device(self, columns: int) -> Callable[[int, int], torch.Tensor]:
        """The function that gives float32 rows [start, stop), for products on a device."""

        def widen(start: int, stop: int) -> torch.Tensor:
            codes = codes_of(self.weight[start:stop], columns, bits=self.bits)
            zero = self.zero if isinstance(self.zero, int) else self.zero[start:stop]
            return decode(codes, self.scale[start:stop], zero, self.group)

        return widen

    def _write_codes(self, weight: torch.Tensor, wide: torch.Tensor, workspace: Workspace) -> None:
        """Codes minus the zero, where that is one for all."""
        if self.bits == 8:
            wide.copy_(weight)
            if isinstance(self.zero, int):
                wide.sub_(self.zero)
            return
        pairs = workspace.take("codes", tuple(weight.shape), torch.int32).copy_(weight)
        codes = pairs.mul_(SPREAD).bitwise_and_(NIBBLES).view(torch.int16)
        if isinstance(self.zero, int):
            codes.sub_(self.zero)
        wide.copy_(codes[:, : wide.shape[1]])


def _apply_by_span(wide: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group_size: int) -> None:
    for columns, groups, size in group_spans(wide.shape[1], group_size):
        part = wide[:, columns].unflatten(1, (-1, size))
        if zero is not None:
            part.sub_(zero[:, groups].float().unsqueeze(2))
        part.mul_(scale[:, groups].float().unsqueeze(2))


def _apply_in_order(wide: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group: torch.Tensor) -> None:
    if zero is not None:
        wide.sub_(zero.float().index_select(1, group))
    wide.mul_(scale.float().index_select(1, group))

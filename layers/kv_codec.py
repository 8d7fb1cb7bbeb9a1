"""Keys and values into the forms of layers.kv_forms, and back to wide numbers.

What cannot be kept is not hidden: a NaN or an infinity among the numbers comes back as NaN, but that fp8 saturates
infinities at 448 times the scale. ... are any leading dims, d is head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch.nn import functional

from layers.kv_forms import GROUP, cache_form
from quant.float8_codec import expand, expansion
from quant.panels import Workspace
from quant.row_codec import scale_of

Kept = Mapping[str, torch.Tensor]
_LARGEST_E4M3, _LARGEST_INT8, _LARGEST_INT4 = 448.0, 127.0, 15.0
_NIBBLES = 0x0F0F  # of a 16-bit number: the low half of each of its bytes


class Room:
    """Buffers to decode into: used again on the CPU, in the allocator's memory (which uses its own again) elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.workspace = device, Workspace()

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized contiguous tensor, valid until the next one of the same name and dtype is taken."""
        if self._device.type == "cpu":
            return self.workspace.take(name, shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self._device)


class KVCodec(Protocol):
    """One form's way in and out."""

    def encode(self, numbers: torch.Tensor, kept: Kept) -> None:
        """Fill the kept tensors (views) from numbers [..., d]."""
        ...

    def decode(self, kept: Kept, out: torch.Tensor, room: Room) -> None:
        """Write the numbers that kept tensors stand for into a contiguous `out` [..., d] of a wide dtype."""
        ...


def codec_for(name: str, *, scale: float, device: torch.device) -> KVCodec | None:
    """The codec of a form, None for "auto". `scale` is fp8's."""
    form = cache_form(name)
    if form == "fp8":
        return Float8(scale, device)
    return {"auto": None, "int8": Int8(), "int4": Int4()}[form]


class Float8:
    """e4m3(x / scale), saturating; back: code * scale in float32, rounded once. Codes of e4m3fnuz, under a scale twice
    as large, hold the same numbers and saturate where the others do."""

    def __init__(self, scale: float, device: torch.device) -> None:
        self._scale = torch.full((1,), scale, dtype=torch.float32, device=device)
        self._on_cpu, self._holds_nan = device.type == "cpu", False

    def encode(self, numbers: torch.Tensor, kept: Kept) -> None:
        """numbers [..., d]."""
        wide = numbers.float() / self._scale
        if self._on_cpu:
            self._holds_nan = self._holds_nan or bool(wide.isnan().any())
        codes = kept["codes"]
        largest = _LARGEST_E4M3 / 2 if codes.dtype == torch.float8_e4m3fnuz else _LARGEST_E4M3
        codes.copy_(wide.clamp_(-largest, largest))

    def decode(self, kept: Kept, out: torch.Tensor, room: Room) -> None:
        """out [..., d]. On a CPU by integer operations, which know no NaN, unless one was ever appended: torch's cast
        from float8 is eight times slower."""
        codes = kept["codes"]
        if self._on_cpu and not self._holds_nan:
            wide = _float32(out, room)
            expand(codes, wide, room.workspace)
            wide.mul_(self._scale * expansion(codes.dtype))
        else:
            wide = codes.float().mul_(self._scale)
        if wide is not out:
            out.copy_(wide)


class Int8:
    """round(x / scale), half to even, scale = the largest magnitude of head and token / 127; zeros have scale 1."""

    def encode(self, numbers: torch.Tensor, kept: Kept) -> None:
        """numbers [..., d]."""
        wide = numbers.float()
        scale = scale_of(wide.abs().amax(-1), largest=_LARGEST_INT8)
        kept["scale"].copy_(scale)
        kept["codes"].copy_((wide / scale.unsqueeze(-1)).round_().clamp_(-_LARGEST_INT8, _LARGEST_INT8))

    def decode(self, kept: Kept, out: torch.Tensor, room: Room) -> None:
        """out [..., d]: code * scale in float32, rounded once."""
        wide = _float32(out, room).copy_(kept["codes"]).mul_(kept["scale"].unsqueeze(-1))
        if wide is not out:
            out.copy_(wide)


class Int4:
    """round((x - minimum) / scale), half to even, scale = (maximum - minimum) / 15 of the group. Two numbers a byte,
    the even one in its low half; an odd head_dim leaves the last high half 0.

    Codes are made with scale and minimum as they are kept, rounded to the model's dtype.
    """

    def encode(self, numbers: torch.Tensor, kept: Kept) -> None:
        """numbers [..., d]."""
        width = numbers.shape[-1]
        grouped = _in_groups(numbers.float())  # [..., groups, 32]
        kept["minimum"].copy_(grouped.amin(-1))
        minimum = kept["minimum"].float().unsqueeze(-1)
        kept["scale"].copy_((grouped.amax(-1) - minimum.squeeze(-1)) / _LARGEST_INT4)
        scale = kept["scale"].float().unsqueeze(-1)
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        codes = ((grouped - minimum) / scale).round_().clamp_(0, _LARGEST_INT4).to(torch.uint8)
        codes = functional.pad(codes.flatten(-2)[..., :width], (0, width % 2))
        kept["codes"].copy_(codes[..., 0::2] | (codes[..., 1::2] << 4))

    def decode(self, kept: Kept, out: torch.Tensor, room: Room) -> None:
        """out [..., d]: code * scale + minimum in float32, rounded once."""
        *lead, groups = kept["scale"].shape
        padded = (*lead, groups * GROUP)
        wide = room.take("wide", padded, torch.float32) if out.shape != padded else _float32(out, room)
        codes = _unpacked(kept["codes"], room)
        count = min(codes.shape[-1], padded[-1])
        wide[..., :count].copy_(codes[..., :count])
        wide[..., count:] = 0
        grouped = wide.view(*lead, groups, GROUP)
        grouped.mul_(kept["scale"].float().unsqueeze(-1)).add_(kept["minimum"].float().unsqueeze(-1))
        if wide is not out:
            out.copy_(wide[..., : out.shape[-1]])


def _float32(out: torch.Tensor, room: Room) -> torch.Tensor:
    return out if out.dtype == torch.float32 else room.take("wide", tuple(out.shape), torch.float32)


def _in_groups(wide: torch.Tensor) -> torch.Tensor:
    """[..., d] -> [..., groups, 32]: a short last group is filled up with its last number, which changes no extreme."""
    *lead, width = wide.shape
    groups = -(-width // GROUP)
    if missing := groups * GROUP - width:
        wide = torch.cat((wide, wide[..., -1:].expand(*lead, missing)), dim=-1)
    return wide.reshape(*lead, groups, GROUP)


def _unpacked(codes: torch.Tensor, room: Room) -> torch.Tensor:
    """Bytes [..., n] -> their halves [..., 2n], uint8, the low one first (this machine's byte order is little)."""
    shape = tuple(codes.shape)
    low = room.take("low", shape, torch.int16).copy_(codes)
    high = torch.mul(low, 1 << 4, out=room.take("high", shape, torch.int16))
    return low.bitwise_or_(high).bitwise_and_(_NIBBLES).view(torch.uint8)

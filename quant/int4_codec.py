"""Integer codes in groups of columns: from wide numbers, strip by strip, and back; two 4-bit codes to a byte.

number = (code - zero) * scale. Codes are unsigned. Symmetric: zero is the middle code (8 of 0..15), and the scale is
the group's largest magnitude over 7. Asymmetric: the scale is (largest - smallest) / 15, zero among the numbers; the
zero point is an integer, so that 0.0 has a code.

Codes are made with the scale as it is kept, rounded. R rows, I input features, G groups. Nibbles: the even column is
the low one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from quant.errors import QuantError
from quant.magnitudes import strips
from quant.panels import Workspace
from quant.row_codec import widened

NIBBLES = 0x000F000F  # of two int16 in an int32
_STRIP_NBYTES = 1 << 20  # of a strip in float32
SPREAD = 0x1001  # as a product: a copy 12 bits further up


def group_spans(columns: int, group_size: int) -> Iterator[tuple[slice, slice, int]]:
    """Columns, their groups, and numbers in each: the whole groups, then the short last one. 0: one group a row."""
    size = group_size or max(1, columns)
    whole = columns // size
    if whole:
        yield slice(0, whole * size), slice(0, whole), size
    if columns % size:
        yield slice(whole * size, columns), slice(whole, whole + 1), columns % size


# --- wide to codes ---------------------------------------------------------------------------------------------------


def encode(
    weight: torch.Tensor, out: Mapping[str, torch.Tensor], *, bits: int, group_size: int, symmetric: bool
) -> None:
    """Fill "weight", "weight_scale" [R, G] and, where not symmetric, "weight_zero_point" [R, G] from a wide [R, I].

    A NaN or an infinity makes its group's scale NaN or infinite; a group of zeros has scale 1 and gives zeros.
    """
    workspace = Workspace()
    for start, stop in strips(weight, nbytes=_STRIP_NBYTES):
        wide = widened(weight[start:stop], workspace)
        for columns, groups, size in group_spans(weight.shape[1], group_size):
            part = wide[:, columns].unflatten(1, (-1, size))
            scale = out["weight_scale"][start:stop, groups]
            if symmetric:
                _encode_symmetric(part, scale, middle=1 << (bits - 1))
            else:
                zero = out["weight_zero_point"][start:stop, groups]
                _encode_asymmetric(part, scale, zero, largest=(1 << bits) - 1)
        offset = 1 << (bits - 1) if symmetric else 0
        _store(wide, out["weight"][start:stop], offset, bits=bits, workspace=workspace)


def _encode_symmetric(part: torch.Tensor, scale: torch.Tensor, *, middle: int) -> None:
    """part [R, G, size] float32 becomes codes minus the middle one."""
    _keep_scale(torch.maximum(part.amax(2), part.amin(2).neg_()).div_(middle - 1), scale)
    part.div_(scale.float().unsqueeze(2)).round_().clamp_(-middle, middle - 1)


def _encode_asymmetric(part: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, *, largest: int) -> None:
    """part [R, G, size] float32 becomes codes."""
    high, low = part.amax(2).clamp_(min=0), part.amin(2).clamp_(max=0)
    _keep_scale((high - low).div_(largest), scale)
    kept = scale.float()
    point = low.neg_().div_(kept).round_().clamp_(0, largest).nan_to_num_(0.0)
    zero.copy_(point)
    part.div_(kept.unsqueeze(2)).round_().add_(point.unsqueeze(2)).clamp_(0, largest)


def _keep_scale(exact: torch.Tensor, scale: torch.Tensor) -> None:
    """Round to the dtype that is kept; what is (or rounds to) zero becomes 1, and its numbers zero."""
    scale.copy_(exact)
    scale.masked_fill_(scale == 0, 1.0)


def _store(wide: torch.Tensor, out: torch.Tensor, offset: int, *, bits: int, workspace: Workspace) -> None:
    """Codes minus `offset`, float32 [R, I], into bytes. A NaN (beside a scale that is none either) is any code."""
    rows, columns = wide.shape
    width = columns if bits == 8 else 2 * out.shape[1]
    codes = _buffer(wide, (rows, width), torch.int16, workspace)
    codes[:, :columns].copy_(wide)
    if offset:
        codes.add_(offset)
    if bits == 8:
        out.copy_(codes)
        return
    codes[:, columns:] = 0
    pairs = codes.view(torch.int32).bitwise_and_(NIBBLES)
    out.copy_(pairs.mul_(SPREAD).bitwise_right_shift_(12))  # the low byte: even | odd << 4


def _buffer(like: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, workspace: Workspace) -> torch.Tensor:
    if like.device.type == "cpu":
        return workspace.take("codes", shape, dtype)
    return torch.empty(shape, dtype=dtype, device=like.device)


# --- codes to wide ---------------------------------------------------------------------------------------------------


def codes_of(weight: torch.Tensor, columns: int | None, *, bits: int) -> torch.Tensor:
    """Codes uint8 [..., I] of bytes [..., ceil(I / 2)] (4 bits; I is even where `columns` is None) or [..., I]."""
    if bits == 8:
        return weight
    both = torch.stack((weight & 15, weight >> 4), -1).flatten(-2)
    return both if columns is None else both[..., :columns]


def store_codes(codes: torch.Tensor, out: torch.Tensor, *, bits: int) -> None:
    """Codes uint8 [R, I] into kept bytes [R, ceil(I / 2)] (4 bits) or [R, I]: the inverse of `codes_of`."""
    if bits == 8:
        out.copy_(codes)
        return
    odd = codes[:, 1::2]
    out.copy_(codes[:, 0::2])
    out[:, : odd.shape[1]].bitwise_or_(odd << 4)


def decode(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | int, group: torch.Tensor | int
) -> torch.Tensor:
    """Float32 [..., I] of codes [..., I]; scale and zero [..., G], or one zero for all; `group`: a group's size (0 for
    the whole row), or the group of each input, int32 [I]."""
    if isinstance(group, int):
        group = torch.arange(codes.shape[-1], device=codes.device) // (group or max(1, codes.shape[-1]))
    zeros = zero if isinstance(zero, int) else zero.float().index_select(-1, group)
    return (codes.float() - zeros).mul_(scale.float().index_select(-1, group))


def check_order(order: torch.Tensor, *, groups: int) -> None:
    """QuantError unless every input's group (`g_idx`, [..., I]) is one of those that there are."""
    least, most = (int(order.min()), int(order.max())) if order.numel() else (0, -1)
    if least < 0 or most >= groups:
        raise QuantError(f"g_idx names groups {least} to {most}, but there are {groups}")

"""The magnitude that a scale is made from: the largest of a row, a block or a whole weight, or one at a percentile.

Magnitudes of floats are ordered as their bits are (the sign bit cleared), and integers are reduced five times as fast
as floats. A NaN's bits are above those of infinity, so it stays the largest. R rows, I input features.

A group that holds NaN or infinity has the largest, whatever the percentile, so that its scale tells of them; and so has
one whose percentile is zero though not all of it is.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quant.panels import Workspace
from quant.percentile import nearest_rank

STRIP_NBYTES = 1 << 20  # of a strip in float32: what is made of it stays in the second-level cache
DEVICE_STRIP_NBYTES = 16 << 20  # launches are few, and little is held beside the result
_BUCKETS = 1 << 16


def strips(weight: torch.Tensor, *, nbytes: int = STRIP_NBYTES) -> list[tuple[int, int]]:
    """Runs of rows whose float32 form has at most `nbytes`; on a device, fits what may be held beside the result."""
    nbytes = nbytes if weight.device.type == "cpu" else DEVICE_STRIP_NBYTES
    size = max(1, nbytes // (4 * max(1, weight.shape[1])))
    return [(row, min(weight.shape[0], row + size)) for row in range(0, weight.shape[0], size)]


def row_magnitudes(weight: torch.Tensor, workspace: Workspace, *, percentile: float | None = None) -> torch.Tensor:
    """float32 [R]: of each row of a wide [R, I]."""
    if weight.shape[1] == 0:
        return torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device)
    largest = torch.empty(weight.shape[0], dtype=_integer(weight), device=weight.device)
    found = torch.empty_like(largest)
    for start, stop in strips(weight):
        bits = magnitude_bits(weight[start:stop], workspace)
        torch.amax(bits, 1, out=largest[start:stop])
        if percentile is not None:
            found[start:stop] = _nth_of_rows(bits, percentile)
    if percentile is None:
        return magnitudes_of(largest, weight.dtype)
    return _chosen(magnitudes_of(found, weight.dtype), magnitudes_of(largest, weight.dtype))


def tensor_magnitude(weight: torch.Tensor, workspace: Workspace, *, percentile: float | None = None) -> torch.Tensor:
    """float32 [1] of a wide [R, I]: of all of it."""
    if weight.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=weight.device)
    parts = [magnitude_bits(weight[start:stop], workspace).amax() for start, stop in strips(weight)]
    largest = magnitudes_of(torch.stack(parts).amax().view(1), weight.dtype)
    if percentile is None:
        return largest
    rank = nearest_rank(percentile, count=weight.numel())
    return _chosen(magnitudes_of(_nth_of_all(weight, rank, workspace), weight.dtype), largest)


def magnitude_bits(part: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """The magnitudes of a strip as integers of the same order: int16 for 2-byte floats, int32 for others, which are
    taken in float32. Valid until the next call."""
    integer = _integer(part)
    if part.element_size() != integer.itemsize:
        part = part.float()
    mask = torch.iinfo(integer).max
    if part.device.type != "cpu":
        return part.view(integer).bitwise_and(mask)
    return torch.bitwise_and(part.view(integer), mask, out=workspace.take("bits", tuple(part.shape), integer))


def group_magnitudes(groups: torch.Tensor, dtype: torch.dtype, *, percentile: float) -> torch.Tensor:
    """float32 [G] at the percentile of each row of magnitude bits [G, n], of numbers that were of `dtype`."""
    return _chosen(magnitudes_of(_nth_of_rows(groups, percentile), dtype), magnitudes_of(groups.amax(1), dtype))


def _integer(weight: torch.Tensor) -> torch.dtype:
    return torch.int16 if weight.element_size() == 2 else torch.int32


def magnitudes_of(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 magnitudes of what `magnitude_bits` makes of numbers of `dtype`."""
    return bits.view(dtype if dtype.itemsize == bits.element_size() else torch.float32).float()


def _chosen(found: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """The percentile's magnitudes, but the largest where that is not finite or the percentile is zero."""
    return torch.where(largest.isfinite() & (found > 0), found, largest)


def _nth_of_rows(bits: torch.Tensor, percentile: float) -> torch.Tensor:
    """The bits at the percentile's rank in each row, from whichever end is nearer."""
    count = bits.shape[1]
    rank = nearest_rank(percentile, count=count)
    if 2 * rank > count:
        return bits.topk(count - rank + 1, 1, sorted=False).values.amin(1)
    return bits.topk(rank, 1, largest=False, sorted=False).values.amax(1)


def _nth_of_all(weight: torch.Tensor, rank: int, workspace: Workspace) -> torch.Tensor:
    """The bits of that rank among all, by counting: first the upper 16 bits, then the lower ones of those that share
    the upper; integers that fit 16 bits are counted once."""
    integer = _integer(weight)
    if integer is torch.int16:
        value, _ = _of_rank(_counts(_all_bits(weight, workspace)), rank)
        return torch.tensor([value], dtype=integer, device=weight.device)
    upper, before = _of_rank(_counts(bits >> 16 for bits in _all_bits(weight, workspace)), rank)
    lower = (bits[bits >> 16 == upper] & 0xFFFF for bits in _all_bits(weight, workspace))
    value, _ = _of_rank(_counts(lower), rank - before)
    return torch.tensor([upper << 16 | value], dtype=integer, device=weight.device)


def _all_bits(weight: torch.Tensor, workspace: Workspace) -> Iterator[torch.Tensor]:
    for start, stop in strips(weight):
        yield magnitude_bits(weight[start:stop], workspace).flatten()


def _counts(parts: Iterator[torch.Tensor]) -> torch.Tensor:
    """int64 [65536]: how often each of 0 ... 65535 is in them."""
    counts = torch.zeros(_BUCKETS, dtype=torch.int64)
    for part in parts:
        counts += torch.bincount(part, minlength=_BUCKETS).to(counts.device)
    return counts


def _of_rank(counts: torch.Tensor, rank: int) -> tuple[int, int]:
    """The bucket that holds the number of that rank, and how many numbers are in those before it."""
    ends = counts.cumsum(0)
    bucket = int(torch.searchsorted(ends, torch.tensor(rank)))
    return bucket, int(ends[bucket] - counts[bucket])

"""Parts of a quantized weight: the scheme that a part is kept in, and its stored tensors, taken from the whole's.

A part is a run of rows of a section and a run of columns. Its codes are those of the whole. Where a cut goes through a
block or a group, both sides keep its scale: the part's scheme has smaller blocks, which divide those of the whole and
the offset, and scales are repeated. Blocks and groups count from a section's first row and column in the whole.

R rows of the part, I its columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING

from quant.cells import Cell, cells
from quant.errors import QuantError
from quant.float8 import Fp8PerBlock
from quant.int4 import IntPerGroup
from quant.microscaling import MxFp4, MxFp8, NvFp4
from quant.nf4 import Nf4
from quant.scheme import Scheme

if TYPE_CHECKING:
    import torch


def cut_scheme(
    scheme: Scheme, *, row_offsets: Sequence[int], columns: tuple[int, int] | None, in_features: int
) -> Scheme:
    """The scheme of a part: rows from `row_offsets` on, one for each of its sections, within the section of the whole
    that it is of; columns [first, stop) of the whole's `in_features` (None: all).

    Raises QuantError for columns that begin or end within a byte of two numbers.
    """
    first, stop = columns or (0, in_features)
    _check_bytes(scheme, first, stop, in_features)
    match scheme:
        case Fp8PerBlock():
            block = gcd(scheme.block[0], *row_offsets), _columns_per_scale(scheme.block[1], first, stop)
            return replace(scheme, block=block)
        case IntPerGroup():
            return _cut_integers(scheme, first, stop, in_features)
        case MxFp8() | MxFp4() | NvFp4():
            return replace(scheme, block=_columns_per_scale(scheme.block, first, stop))
        case Nf4():
            return _cut_nf4(scheme, row_offsets, first, stop, in_features)
    return scheme


def _check_bytes(scheme: Scheme, first: int, stop: int, in_features: int) -> None:
    packed = cells(scheme, in_features)["weight"].columns
    for edge in (first, stop):
        if edge % packed and edge != in_features:
            raise QuantError(
                f"{scheme.name}: columns {first} to {stop} of {in_features} are cut at {edge}, within a byte of "
                f"{packed} numbers"
            )


def _columns_per_scale(group: int, first: int, stop: int) -> int:
    """The largest groups of a part's columns that each lie in one group of the whole's; 0: one for all."""
    if group == 0 or stop <= (first // group + 1) * group:  # the part lies in one group
        return group
    return gcd(group, first)


def _cut_integers(scheme: IntPerGroup, first: int, stop: int, in_features: int) -> IntPerGroup:
    if not scheme.ordered:
        return replace(scheme, group_size=_columns_per_scale(scheme.group_size, first, stop))
    if (first, stop) == (0, in_features):
        return scheme
    return replace(scheme, groups=scheme.groups or -(-in_features // (scheme.group_size or max(1, in_features))))


def _cut_nf4(scheme: Nf4, row_offsets: Sequence[int], first: int, stop: int, in_features: int) -> Nf4:
    """Blocks run over the numbers of a section, row after row: what divides a row and the cuts lies in one block."""
    if (first, stop) == (0, in_features) and not any(offset % scheme.span for offset in row_offsets):
        return scheme
    return replace(scheme, block=gcd(scheme.block, in_features, first, stop), span=1)


def cut_stored(
    scheme: Scheme,
    stored: Mapping[str, torch.Tensor],
    part_scheme: Scheme,
    *,
    rows: tuple[int, int],
    columns: tuple[int, int] | None,
    total_rows: int,
    in_features: int,
) -> dict[str, torch.Tensor]:
    """What `part_scheme` (of `cut_scheme`) keeps of rows [first, stop) and columns [first, stop) (None: all) of what is
    stored for one section of `total_rows` rows and `in_features` columns: views, copies where scales are repeated.

    Of some of the stored tensors, where others are not given. Raises QuantError for rows or columns that there are not,
    and as `cut_scheme` does.
    """
    across = columns or (0, in_features)
    for name, (first, stop), size in (("rows", rows, total_rows), ("columns", across, in_features)):
        if not 0 <= first <= stop <= size:
            raise QuantError(f"{scheme.name}: {name} {first} to {stop} of a weight that has {size}")
    _check_bytes(scheme, *across, in_features)
    found = {}
    own = cells(part_scheme, across[1] - across[0])
    for name, cell in cells(scheme, in_features).items():
        if name not in stored:
            continue
        if name == "weight_scale" and isinstance(scheme, Nf4) and scheme.span > 1:
            found[name] = _nf4_scales(scheme, stored[name], part_scheme, rows, across, in_features)
        else:
            found[name] = _cut(stored[name], cell, own[name], rows, across)
    return found


def put_parts(found: Mapping[str, torch.Tensor], out: Mapping[str, torch.Tensor]) -> None:
    """Copy what `cut_stored` has found to where it stays."""
    for name, tensor in found.items():
        out[name].copy_(tensor)


def _cut(tensor: torch.Tensor, cell: Cell, own: Cell, rows: tuple[int, int], columns: tuple[int, int]) -> torch.Tensor:
    taken = _along(tensor, 0, cell.rows, own.rows, rows)
    return _along(taken, 1, cell.columns, own.columns, columns) if tensor.dim() > 1 else taken


def _along(tensor: torch.Tensor, dim: int, size: int, own: int, span: tuple[int, int]) -> torch.Tensor:
    """The elements of `dim`, each of which stands for `size` of the whole's, as one for each `own` of the part's."""
    first, stop = span
    if size == 0:
        return tensor
    count = -(-(stop - first) // own)
    if size == own:
        return tensor.narrow(dim, first // size, count)
    return _select(tensor, dim, [(first + index * own) // size for index in range(count)])


def _select(tensor: torch.Tensor, dim: int, indices: Sequence[int]) -> torch.Tensor:
    """Copies of these elements; as bytes, since not every operator knows every float of eight bits."""
    import torch

    at = torch.tensor(indices, dtype=torch.int64, device=tensor.device)
    if tensor.element_size() > 1:
        return tensor.index_select(dim, at)
    return tensor.view(torch.uint8).index_select(dim, at).view(tensor.dtype)


def _nf4_scales(
    scheme: Nf4,
    scale: torch.Tensor,
    part_scheme: Scheme,
    rows: tuple[int, int],
    columns: tuple[int, int],
    in_features: int,
) -> torch.Tensor:
    """float32 [ceil(R / span), span * I / block] of the part's scheme, of blocks that reach over rows."""
    import torch

    assert isinstance(part_scheme, Nf4)
    if part_scheme == scheme:
        return scale[rows[0] // scheme.span : -(-rows[1] // scheme.span)]
    row_starts = torch.arange(*rows, device=scale.device).unsqueeze(1) * in_features
    numbers = row_starts + torch.arange(*columns, part_scheme.block, device=scale.device)
    return scale.flatten()[numbers // scheme.block]

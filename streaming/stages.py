"""The stages as plain functions: from an item's bytes to its place in the stored tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from layers.parallel import Group
from quant.disk_forms.form import same_bytes
from quant.dtypes import DType, to_torch
from quant.int4 import ORDER
from quant.int4_codec import check_order
from quant.scheme import StoredSpec
from quant.sections import cut_rows
from streaming.checkpoint.decode import decode_into
from streaming.errors import OptionError
from streaming.plan import LoadItem


def needs_host(item: LoadItem) -> bool:
    """Whether its bytes can only be decoded by the CPU (block formats, permuted rows, the other byte order)."""
    return not item.tensor.is_plain


def is_quantized(item: LoadItem) -> bool:
    """Whether the item has yet to be brought into another form than its wide numbers."""
    return item.stored is None and not item.leaf and item.param.is_quantized


def wide_dtype(item: LoadItem) -> DType:
    """The dtype of the numbers that the slice stage hands on: a weight is quantized from what is on disk, and what is
    stored there already stays as it is."""
    if item.stored is not None or item.leaf:
        return item.tensor.dtype
    if not is_quantized(item):
        return item.param.dtype
    return item.tensor.dtype if item.tensor.is_plain else DType.F32


def needs_decoding(item: LoadItem) -> bool:
    """Whether the bytes on disk are not yet those numbers."""
    return not item.tensor.is_plain or item.tensor.dtype is not wide_dtype(item)


def item_views(item: LoadItem, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parts of a parameter's stored tensors that this item fills: rows of a section, with their scales.

    An item of several sections has parts of its own for each of them where it is quantized (see `store_item`).
    """
    if item.stored is not None:
        whole = stored[item.stored]
        return {item.stored: whole[item.rows[0] : item.rows[1]] if whole.dim() else whole}
    if item.leaf and item.param.is_cut_within:
        first = item.param.section_starts[item.section]
        return {item.fills: stored[item.fills][first + item.section_rows[0] : first + item.section_rows[1]]}
    if item.leaf:
        view = _coded_views(item, stored)[item.fills]
        return {item.fills: view[item.section_rows[0] : item.section_rows[1]] if item.is_as_stored else view}
    rows = sum(item.param.section_rows[item.section : item.section + item.sections])
    if is_quantized(item):
        views = item.param.scheme.section_views(stored, item.param.section_rows, item.section)
        multiple = item.param.scheme.row_multiple
    else:
        first = item.param.section_starts[item.section]
        views = {name: tensor[first : first + rows] for name, tensor in stored.items()}
        multiple = 1
    if item.section_rows == (0, rows):
        return views
    start, stop = item.section_rows
    return cut_rows(views, rows=rows, multiple=multiple, start=start, stop=stop)


def _coded_views(item: LoadItem, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the run of sections fills that the item is part of: of the parameter's own stored tensors, or of those that
    hold the run (`arrival`) until it is quantized anew."""
    param, run = item.param, item.param.run_at(item.section)
    if param.kept_as_stored:
        return param.scheme.section_views(stored, param.run_rows, run)
    return item.form.kept.section_views(stored, (param.run_rows[run],), 0)


def arrival(item: LoadItem) -> dict[str, StoredSpec]:
    """The tensors that hold the item's run of sections in its form on disk, until it is whole and quantized anew."""
    rows, in_features = item.form_shape
    return item.form.kept.storage((rows,), in_features, wide=item.param.dtype)


def place_of_rows(item: LoadItem, stored: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Where an item that is decoded and not quantized can be written at once, in the shape and dtype of its numbers."""
    if is_quantized(item) or not needs_decoding(item) or item.picked or item.columns or item.held:
        return None
    if not item.leaf:
        (view,) = item_views(item, stored).values()
        return view
    if not (item.param.kept_as_stored and item.is_as_stored):
        return None
    (view,) = item_views(item, stored).values()
    dtype = to_torch(item.tensor.dtype)
    return view.view(dtype).view(item_shape(item)) if dtype.itemsize == view.dtype.itemsize else None


def share(item: LoadItem, raw: torch.Tensor, *, group: Group) -> torch.Tensor:
    """The item's bytes, on the host: on their way to the ranks that have not read them, or from the one that has.

    Nothing waits in a circle. Every rank of a group enters here for its items in plan order, from one stage, which has
    handed on all items before (see streaming.batches), and the order is the same on all of them. Take the first item
    that is not yet shared on every rank that wants it: its owner is held up by no earlier one, and has, or will get,
    its bytes, since reading waits for window room alone, which earlier items give back as they are quantized. To be
    quantized they may need the maxima of other ranks, where the same item has been shared as well. Maxima go over a
    group of their own, from the next stage: the two never meet.

    Raises OptionError in a load of one rank, which nobody shares with.
    """
    if item.shared is not None:
        if item.shared.ranks[-1] >= group.size:
            raise OptionError(f"--read-sharing shared: {item.tensor.name} is shared with ranks that are not there")
        group.broadcast(raw, root=item.shared.owner, ranks=item.shared.ranks)
    return raw


def slice_item(item: LoadItem, raw: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """The item's wide numbers [rows, ...] in `wide_dtype`: uint8 `raw` is decoded, permuted, converted; of a parameter
    that is cut over ranks this rank's rows and columns, unless all are needed to quantize them.

    With `out` they are written there (and that is returned); without, a plain item is a view of `raw`.
    """
    return _own(item, _numbers(item, raw, out))


def _own(item: LoadItem, numbers: torch.Tensor) -> torch.Tensor:
    if item.picked and not item.scales_of_all:
        numbers = torch.cat([numbers[first:stop] for first, stop in item.picked])
    if item.columns is None or item.scales_of_all:
        return numbers
    if item.leaf:
        return numbers.flatten(1).view(torch.uint8)[:, slice(*item.columns)]
    return numbers[:, slice(*item.columns)]


def _numbers(item: LoadItem, raw: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    shape = item_shape(item)
    dtype = to_torch(wide_dtype(item))
    if not needs_decoding(item):
        return raw.view(dtype).view(shape)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=raw.device)
    if item.tensor.is_plain:
        out.copy_(_plain(raw, item).view(shape))
    else:
        decode_into(item.tensor, raw, out, first_row=item.rows[0])
    return out


def item_shape(item: LoadItem) -> tuple[int, ...]:
    """The shape of the item's numbers."""
    if item.stored is not None or item.leaf:
        return (item.rows[1] - item.rows[0], *item.tensor.shape[1:]) if item.tensor.shape else ()
    if item.param.is_cut_within:
        return (item.rows[1] - item.rows[0], *item.tensor.shape[1:])
    return (item.rows[1] - item.rows[0], *item.param.shape[1:])


def _plain(raw: torch.Tensor, item: LoadItem) -> torch.Tensor:
    source = to_torch(item.tensor.dtype)
    if raw.data_ptr() % source.itemsize:  # a view needs aligned bytes; window slots give them, other callers may not
        raw = raw.clone()
    return raw.view(source)


def store_item(item: LoadItem, wide: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> None:
    """Put the wide numbers into their place in the parameter's stored tensors: quantized, section by section, where it
    has a scheme, copied where not. A tensor of a form on disk is turned into what is kept of it."""
    if item.leaf and not item.is_as_stored:
        item.form.place(item.leaf, wide, _coded_views(item, stored))
        return
    if item.stored == ORDER:
        check_order(wide, groups=stored["weight_scale"].shape[1])
    if not is_quantized(item):
        (target,) = item_views(item, stored).values()
        if target.data_ptr() != wide.data_ptr():
            target.copy_(same_bytes(wide, target) if item.leaf else wide.reshape(target.shape))
        return
    for part, numbers in _sections(item, wide):
        item.param.scheme.quantize_into(numbers, item_views(part, stored))


def _sections(item: LoadItem, wide: torch.Tensor) -> Iterator[tuple[LoadItem, torch.Tensor]]:
    if item.sections == 1:
        yield item, wide
        return
    first = 0
    for section in range(item.section, item.section + item.sections):
        rows = item.param.section_rows[section]
        part = replace(item, section=section, sections=1, section_rows=(0, rows))
        yield part, wide[first : first + rows]
        first += rows

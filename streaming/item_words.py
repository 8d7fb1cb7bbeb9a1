"""One item of a plan in words, for `inspect` and for the debug log: what is read, and what it becomes. [no-torch]"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from layers.topology import Topology
from streaming.plan import LayerPlan, LoadItem

logger = logging.getLogger(__name__)
Span = tuple[int, int]


@dataclass(frozen=True)
class Feed:
    """What a parameter gets of one tensor: the first of its items, and the rows of all of them."""

    item: LoadItem
    rows: Span


def log_item(item: LoadItem, *, topology: Topology) -> None:
    """A line for each item that is handled, with FIRSTLAYER_LOG=debug: name, shape, dtype, target, part, rank slice."""
    if logger.isEnabledFor(logging.DEBUG):
        slices = slice_words(item, item.rows)
        rank = f"rank {topology.rank} of {topology.world}"
        logger.debug("%s: %s -> %s, %s (%s)", item.layer, source_words(item), target_words(item), slices, rank)


def feeds(layer: LayerPlan, param: str) -> Iterator[Feed]:
    """What feeds a parameter, tensor by tensor and section by section."""
    own = (item for item in layer.items if item.param.name == param)
    for _, group in groupby(own, key=lambda item: (item.tensor.name, item.section, item.stored, item.leaf)):
        items = tuple(group)
        yield Feed(items[0], (min(item.rows[0] for item in items), max(item.rows[1] for item in items)))


def source_words(item: LoadItem) -> str:
    """The tensor: name, form, shape."""
    tensor = item.tensor
    return f"{tensor.name} {tensor.encoding.name if tensor.encoding else tensor.dtype.value} {_disk_shape(item)}"


def _disk_shape(item: LoadItem) -> list[int]:
    """With all columns, where some are read alone."""
    tensor = item.tensor
    if not item.stride_nbytes:
        return list(tensor.shape)
    if tensor.encoding:
        return [tensor.shape[0], item.stride_nbytes // tensor.encoding.block_nbytes * tensor.encoding.block_values]
    return [tensor.shape[0], item.stride_nbytes // tensor.dtype.itemsize]


def target_words(item: LoadItem) -> str:
    """The parameter, and which part of it."""
    if item.stored is not None:
        return f"{item.param.name} [{item.param.scheme.name}] {item.stored} as stored"
    part = part_words(item)
    if item.leaf:
        return f"{item.param.name} [{item.param.scheme.name}] {item.fills}{f' part {part}' if part else ''}"
    return f"{item.param.name} [{item.param.scheme.name}]{f' part {part}' if part else ''}"


def part_words(item: LoadItem) -> str:
    """The names of the sections that the item fills: "'q'", or "'gate' and 'up'"; "" where there is one without."""
    sections = item.param.sections[item.section : item.section + item.sections]
    return " and ".join(repr(section.name) for section in sections if section.name)


def slice_words(item: LoadItem, rows: Span) -> str:
    """Which rows of the tensor are taken (`rows` of what is read), and which columns where not all of them are."""
    spans = " and ".join(_span(*span) for span in _tensor_rows(item, rows))
    columns = item.param.cut.columns if item.param.cut is not None and item.stored is None else None
    if columns is None or _has_all_columns(item):
        return f"rows {spans}"
    return f"rows {spans}, columns {_span(*columns)}"


def _tensor_rows(item: LoadItem, rows: Span) -> Sequence[Span]:
    """Rows as the tensor on disk counts them: of two kinds of items `rows` counts from the first that is read."""
    if item.picked:
        return item.picked
    if item.param.is_cut_within and item.stored is None and not item.leaf:
        part = item.param.parts[item.section]
        if item.tensor.strides is not None and not item.scales_of_all:
            return ((part.start, part.stop),)
        if item.sections == 2 and item.tensor.rope_heads:  # a gate's and an up's rows take turns
            return ((2 * part.start, 2 * part.stop),)
    return (rows,)


def _has_all_columns(item: LoadItem) -> bool:
    """Whether a leaf of a weight that is cut by columns is one that all ranks have the whole of."""
    return bool(item.leaf) and not (item.columns or item.stride_nbytes)


def _span(first: int, stop: int) -> str:
    return f"{first} to {stop}"


def place_words(item: LoadItem) -> str:
    """Where its bytes are."""
    return "made up" if item.tensor.generated else f"{item.tensor.file.name} at byte {item.tensor.offset:,}"

"""One item of a plan in words, for `inspect` and for the debug log: what is read, and what it becomes. [no-torch]"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from streaming.plan import LayerPlan, LoadItem

logger = logging.getLogger(__name__)


def log_item(item: LoadItem) -> None:
    """A line for each item that is handled, with FIRSTLAYER_LOG=debug: name, shape, dtype, target, part, rank slice."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s: %s -> %s%s", item.layer, source_words(item), target_words(item), slice_words(item))


def feeds(layer: LayerPlan, param: str) -> Iterator[LoadItem]:
    """The first item of each tensor that feeds a parameter."""
    for item in layer.items:
        first = item.rows[0] == 0 if item.stored is not None or item.leaf else item.section_rows[0] == 0
        if item.param.name == param and first:
            yield item


def source_words(item: LoadItem) -> str:
    """The tensor: name, form, shape."""
    tensor = item.tensor
    return f"{tensor.name} {tensor.encoding.name if tensor.encoding else tensor.dtype.value} {list(tensor.shape)}"


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


def slice_words(item: LoadItem) -> str:
    """Which of the tensor's rows, for which rank."""
    return f", rows {item.rows[0]} to {item.rows[1]} (rank 0 of 1)"


def place_words(item: LoadItem) -> str:
    """Where its bytes are."""
    return "made up" if item.tensor.generated else f"{item.tensor.file.name} at byte {item.tensor.offset:,}"

"""The rows of a fused weight, section by section: where each begins, and how they add up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def total_rows(sections: tuple[int, ...]) -> int:
    """Rows of the whole weight."""
    return sum(sections)


def row_range(sections: tuple[int, ...], index: int) -> slice:
    """The rows that section `index` fills."""
    first = sum(sections[:index])
    return slice(first, first + sections[index])


def rows_at_once(most: int, *, multiple: int) -> int:
    """How many rows a weight may be cut into runs of: about `most`, but whole ones of what is stored for `multiple`."""
    return max(multiple, most // multiple * multiple) if multiple else most


def cut_rows(
    stored: Mapping[str, torch.Tensor], *, rows: int, multiple: int, start: int, stop: int
) -> dict[str, torch.Tensor]:
    """Views of what is stored for a section of `rows` rows that belong to its rows [start, stop).

    A tensor with a row for each is cut there; others have one for each `multiple` rows (which divides `start`), or
    belong to the whole section where that is 0.
    """

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape[0] == rows:
            return tensor[start:stop]
        return tensor if multiple == 0 else tensor[start // multiple : -(-stop // multiple)]

    return {name: cut(tensor) for name, tensor in stored.items()}

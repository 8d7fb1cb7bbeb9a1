"""The rows of a fused weight, section by section: where each begins, and how they add up."""

from __future__ import annotations


def total_rows(sections: tuple[int, ...]) -> int:
    """Rows of the whole weight."""
    return sum(sections)


def row_range(sections: tuple[int, ...], index: int) -> slice:
    """The rows that section `index` fills."""
    first = sum(sections[:index])
    return slice(first, first + sections[index])

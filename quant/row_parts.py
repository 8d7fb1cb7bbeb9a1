"""A weight whose rows lie in several places, such as the projections that a layer has joined and a file has not."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class RowParts:
    """Weights [rows, I] of one dtype, one behind the other: what a product asks of a weight [O, I] of all their rows.

    A product does the same with it as with one tensor: cut into the same panels, it has the same bits.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        """Raises ValueError for none, for parts of different widths or dtypes."""
        if len({(part.shape[1:], part.dtype) for part in parts}) != 1:
            found = ", ".join(f"{list(part.shape)} {part.dtype}" for part in parts)
            raise ValueError(f"parts of one weight have one width and dtype, not {found or 'none'}")
        self.parts = tuple(parts)
        self.dtype = parts[0].dtype
        self.shape = torch.Size((sum(part.shape[0] for part in parts), *parts[0].shape[1:]))

    def element_size(self) -> int:
        """Bytes of a number."""
        return self.parts[0].element_size()

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Rows [start, stop): a view where they lie in one part, else a copy."""
        start, stop, _ = rows.indices(self.shape[0])
        found, first = [], 0
        for part in self.parts:
            last = first + part.shape[0]
            if max(start, first) < min(stop, last):
                found.append(part[max(start, first) - first : min(stop, last) - first])
            first = last
        if len(found) == 1:
            return found[0]
        return torch.cat(found or [self.parts[0][:0]])


Rows = torch.Tensor | RowParts
"""A weight [O, I], in one place or in several."""

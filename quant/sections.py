"""The rows of a fused weight, section by section: where each begins, how they add up, and what is done one by one.

O rows of the whole weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from quant.scheme import Scheme

    Numbers = Callable[[dict[str, torch.Tensor]], torch.Tensor]
    Product = Callable[[dict[str, torch.Tensor], torch.Tensor | None], torch.Tensor]


def total_rows(sections: tuple[int, ...]) -> int:
    """Rows of the whole weight."""
    return sum(sections)


def row_range(sections: tuple[int, ...], index: int) -> slice:
    """The rows that section `index` fills."""
    first = sum(sections[:index])
    return slice(first, first + sections[index])


def row_views(stored: Mapping[str, torch.Tensor], sections: tuple[int, ...], index: int) -> dict[str, torch.Tensor]:
    """The rows that section `index` has in stored tensors that have one for each row of the weight: views."""
    rows = row_range(sections, index)
    return {name: tensor[rows] for name, tensor in stored.items()}


def for_each_row(numbers: torch.Tensor, sections: tuple[int, ...]) -> torch.Tensor:
    """One number for each section, [sections], as one for each row, [O]; a view where there is one section."""
    import torch

    if len(sections) == 1:
        return numbers.expand(sections[0])
    return torch.cat([numbers[index : index + 1].expand(rows) for index, rows in enumerate(sections)])


def dequantize_by_section(
    scheme: Scheme,
    stored: Mapping[str, torch.Tensor],
    sections: tuple[int, ...],
    *,
    dtype: torch.dtype,
    numbers: Numbers,
) -> torch.Tensor:
    """[O, I] in `dtype`, rounded once from what `numbers(views)` makes of each section, float32 [its rows, I]."""
    import torch

    parts = [numbers(scheme.section_views(stored, sections, index)).to(dtype) for index in range(len(sections))]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def linear_by_section(
    scheme: Scheme,
    stored: Mapping[str, torch.Tensor],
    sections: tuple[int, ...],
    bias: torch.Tensor | None,
    *,
    product: Product,
) -> torch.Tensor:
    """[..., O] of a weight whose sections no one product reads together: `product(views, bias)` of each, with its part
    of bias [O]."""
    import torch

    biases = [None] * len(sections) if bias is None else bias.split(list(sections))
    outs = [product(scheme.section_views(stored, sections, index), part) for index, part in enumerate(biases)]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)


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

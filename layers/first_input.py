"""What the first layer makes of the embedding rows before anything else: it scales them and adds learned positions.

It belongs to the layer and not to the embedding, because a prompt's rows are fetched on their own while the embedding
is not there yet; and the table of positions arrives with the layer that needs it. T tokens, D hidden size.
"""

from __future__ import annotations

import torch
from torch import nn

from layers.batch import Batch
from layers.parameters import declare, parameter
from layers.weights import ParamSpec


class LearnedPositions(nn.Module):
    """A table [positions, D] of vectors that are looked up by position."""

    def __init__(self, weight: ParamSpec) -> None:
        super().__init__()
        declare(self, weight)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """positions [T] -> [T, D]."""
        return nn.functional.embedding(positions, parameter(self, "weight"))


def scaled(hidden: torch.Tensor, scale: float | None) -> torch.Tensor:
    """The rows times `scale`, which is rounded to their dtype first, as the reference rounds it."""
    return hidden if scale is None else hidden * torch.tensor(scale, dtype=hidden.dtype)


def first_input(
    hidden: torch.Tensor, batch: Batch, *, scale: float | None, positions: LearnedPositions | None
) -> torch.Tensor:
    """Embedding rows [T, D] as the first layer takes them."""
    hidden = scaled(hidden, scale)
    return hidden if positions is None else hidden + positions(batch.positions)

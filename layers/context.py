"""What a step of the forward pass is given by whoever runs it: passed along as an argument, never global."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from layers.parallel import Groups

if TYPE_CHECKING:
    import torch

    from quant.kernels import Kernels
    from quant.row_parts import RowParts

    Stored = Mapping[str, torch.Tensor]


def proceed() -> None:
    """The check of a run that nobody cancels."""


def rows_present(param: str, stop_row: int) -> None:
    """The wait of a run whose parameters are all there."""


AwaitExperts = Callable[[str, Sequence[int]], Iterator[int]]
"""(a parameter of all experts of a layer, which of them are needed) -> gives each, in the order of their numbers, when
it is there; it stays until the next one is asked for."""


class StreamedWeights(Protocol):
    """Weights that are in memory only while they are used."""

    def lease(self, param: str) -> AbstractContextManager[Stored | RowParts | None]:
        """The stored tensors of a linear weight for the length of the block, or the parts that a wide one is in; None
        where the module has them. Waits for them."""
        ...

    def lease_rows(self, param: str, start: int, stop: int) -> AbstractContextManager[Stored | None]:
        """The stored tensors for rows [start, stop) of the head: those of one of its chunks."""
        ...


@dataclass(frozen=True)
class StepContext:
    """kernels: which matmul runs.

    packed: whether linear layers use their packed copies, where they have been given any.
    check: called before every matmul; raises to end a pass that is no longer wanted.
    await_rows: called by the head before it reads rows of a parameter, with the parameter's name and the row where
    they stop; returns when rows [0, stop) are there. That is how the head is computed while its last rows arrive.
    int8_activations: whether linear layers (not the head) multiply activations in 8 bits (quant.activations).
    groups: the ranks that share the work of a layer (layers.parallel).
    await_experts: called by a sparse layer once it knows which experts its tokens go to, before any of them is read.
    None where all are there: then the layer need not look.
    weights: who has the weights that are streamed; None where every module has its own.
    foresee_experts: called by a sparse layer with the name of the same parameter and its input x [T, D], once it has
    asked for its experts and before it computes them, so that those of the next sparse layer can be thought of.
    """

    kernels: Kernels
    packed: bool = False
    check: Callable[[], None] = proceed
    await_rows: Callable[[str, int], None] = rows_present
    int8_activations: bool = False
    groups: Groups = field(default_factory=Groups)
    await_experts: AwaitExperts | None = None
    weights: StreamedWeights | None = None
    foresee_experts: Callable[[str, torch.Tensor], None] | None = None

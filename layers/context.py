"""What a step of the forward pass is given by whoever runs it: passed along as an argument, never global."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layers.parallel import Groups

if TYPE_CHECKING:
    from quant.kernels import Kernels


def proceed() -> None:
    """The check of a run that nobody cancels."""


def rows_present(param: str, stop_row: int) -> None:
    """The wait of a run whose parameters are all there."""


AwaitExperts = Callable[[str, Sequence[int]], None]
"""(a parameter of all experts of a layer, which of them are needed) -> returns when those are there."""


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
    """

    kernels: Kernels
    packed: bool = False
    check: Callable[[], None] = proceed
    await_rows: Callable[[str, int], None] = rows_present
    int8_activations: bool = False
    groups: Groups = field(default_factory=Groups)
    await_experts: AwaitExperts | None = None

"""The feed-forward part of a layer, gated or plain. T tokens, D hidden size, I intermediate size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import pi, sqrt

import torch
from torch import nn
from torch.nn import functional

from layers.context import StepContext
from layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear

Activation = Callable[[torch.Tensor], torch.Tensor]

# Elements that torch gives to one thread whole: gelu is cut above 0x4000, everything else from 32768 on.
LARGEST_UNCUT = 0x4000
VECTOR = 64  # elements of two 512-bit vectors of half precision: the longest step of torch's vector loops


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(
        self, *, gate_up_proj: MergedColumnParallelLinear, down_proj: RowParallelLinear, activation: str
    ) -> None:
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self._act = ACTIVATIONS[activation]

    def forward(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x [T, D] -> [T, D]."""
        return self.down_proj.summed(self.product(x, ctx), ctx)

    def product(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x [T, D] -> [T, D], without the other ranks' parts of the sum."""
        gate, up = self.gate_up_proj(x, ctx)  # [T, I] each
        return self.down_proj.product(gated(gate, up, activation=self._act), ctx)


class PlainMLP(nn.Module):
    """fc2(act(fc1(x)))."""

    def __init__(self, *, fc1: ColumnParallelLinear, fc2: RowParallelLinear, activation: str) -> None:
        super().__init__()
        self.fc1 = fc1
        self.fc2 = fc2
        self._act = ACTIVATIONS[activation]

    def forward(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x [T, D] -> [T, D]."""
        out: torch.Tensor = self.fc2(activated(self.fc1(x, ctx), activation=self._act), ctx)
        return out


def gated(gate: torch.Tensor, up: torch.Tensor, *, activation: Activation) -> torch.Tensor:
    """activation(gate) * up, each [T, I], with the same bits for every number of threads.

    Torch gives each thread a run of a large elementwise operation, and computes what is left of a run behind its last
    whole vector by another formula (scalar instead of vector): the bits of silu and gelu then depend on where the runs
    end. So silu is done at once where all runs are whole vectors; everything else in pieces too small to be cut (gelu
    always: it has one more kernel, for contiguous input).
    """
    if gate.device.type != "cpu" or (activation is functional.silu and _cut_at_vectors(*gate.shape)):
        return activation(gate) * up
    out = torch.empty(gate.shape, dtype=gate.dtype)
    for piece in uncut_pieces(*gate.shape):
        torch.mul(activation(gate[piece]), up[piece], out=out[piece])
    return out


def clamped_gated(gate: torch.Tensor, up: torch.Tensor, *, limit: float, alpha: float) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), each [T, I], rounded step by step; gate is at most `limit`, up lies
    between -limit and limit. The same bits for every number of threads (see `gated`)."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    pieces = [(slice(None), slice(None))] if gate.device.type != "cpu" else uncut_pieces(*gate.shape)
    for piece in pieces:
        bounded = gate[piece].clamp(max=limit)
        torch.mul(up[piece].clamp(-limit, limit) + 1, bounded * torch.sigmoid(bounded * alpha), out=out[piece])
    return out


def activated(x: torch.Tensor, *, activation: Activation) -> torch.Tensor:
    """activation(x) of x [T, I], with the same bits for every number of threads (see `gated`)."""
    if x.device.type != "cpu" or (activation is functional.silu and _cut_at_vectors(*x.shape)):
        return activation(x)
    out = torch.empty(x.shape, dtype=x.dtype)
    for piece in uncut_pieces(*x.shape):
        out[piece] = activation(x[piece])
    return out


def uncut_pieces(count: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Pieces of a [count, width] tensor, each small enough that torch gives it to one thread whole."""
    columns = min(width, LARGEST_UNCUT)
    rows = LARGEST_UNCUT // columns
    for top in range(0, count, rows):
        for left in range(0, width, columns):
            yield slice(top, top + rows), slice(left, left + columns)


def _cut_at_vectors(count: int, width: int) -> bool:
    """Whether every run that torch would give to a thread ends at a whole vector of its row."""
    threads, numel = torch.get_num_threads(), count * width
    runs = min(threads, -(-numel // 32_768))  # at::internal::GRAIN_SIZE elements are worth a thread
    return width % VECTOR == 0 and -(-numel // runs) % VECTOR == 0


def gelu_new(x: torch.Tensor) -> torch.Tensor:
    """GELU's tanh form, rounded step by step (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    return 0.5 * x * (1.0 + torch.tanh(sqrt(2.0 / pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_fast(x: torch.Tensor) -> torch.Tensor:
    """The same with the constant cut to ten digits and the terms in another order."""
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU's sigmoid form."""
    return x * torch.sigmoid(1.702 * x)


# The names are those that `hidden_act` may hold.
ACTIVATIONS: dict[str, Activation] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": gelu_new,
    "gelu_fast": gelu_fast,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu": functional.relu,
}

"""Looking ahead: what the next sparse layer will need, by its own router over what this layer's experts are given.

Two layers behind one another see nearly the same hidden state, since each only adds to it, so the next router chooses
much the same from it (Eliseev and Mazur, Fast inference of mixture-of-experts language models with offloading, 2023).
How often it is right is measured in BENCHMARKS.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from layers.context import StepContext
from layers.decoder import DecoderModel
from layers.moe import SparseMLP
from quant.kernels import Kernels

MOST_TOKENS = 8  # of a step: more are routed to most experts, and the order in which they come is then known anyway


@dataclass(frozen=True)
class Foresight:
    """`by_param`: for a layer's experts, the next sparse layer's name, and its part that routes. `is_ready`: whether a
    layer's router is there; `foresee`: who is told (streaming.expert_cache); `is_wanted`: whether that wants to know.
    """

    by_param: Mapping[str, tuple[str, SparseMLP]]
    kernels: Kernels
    is_ready: Callable[[str], bool]
    foresee: Callable[[str, Sequence[int]], None]
    is_wanted: Callable[[], bool]

    def __call__(self, param: str, x: torch.Tensor) -> None:
        """x [T, D]: the input of the layer that `param` belongs to."""
        if param not in self.by_param or x.shape[0] > MOST_TOKENS or not self.is_wanted():
            return
        layer, mlp = self.by_param[param]
        if self.is_ready(layer):
            # every token's first choice, then every second one
            _, chosen = mlp.gate(x, StepContext(self.kernels))
            self.foresee(mlp.experts.gate_up_proj.name, list(dict.fromkeys(chosen.T.flatten().tolist())))


def make_foresight(
    model: DecoderModel,
    kernels: Kernels,
    *,
    is_ready: Callable[[str], bool],
    foresee: Callable[[str, Sequence[int]], None],
    is_wanted: Callable[[], bool],
) -> Foresight:
    """For the sparse layers of a shell, each with the one behind it; behind the last one comes the next token, whose
    hidden state nobody knows."""
    parts = ((f"layers.{index}", getattr(layer, "mlp", None)) for index, layer in enumerate(model.layers))
    sparse = [(name, mlp) for name, mlp in parts if isinstance(mlp, SparseMLP)]
    by_param = {mlp.experts.gate_up_proj.name: after for (_, mlp), after in pairwise(sparse)}
    return Foresight(by_param, kernels, is_ready, foresee, is_wanted)

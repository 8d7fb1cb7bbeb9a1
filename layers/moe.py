"""Sparse feed-forward layers: a router sends each token to a few of many experts; some have an expert for all tokens.

T tokens, D hidden size, E experts, k experts for each token, I an expert's intermediate size. The experts of a layer
are two parameters, whose sections are the experts' own: gate_up_proj [E * 2I, D] (gate and up of expert 0, of expert 1,
...), down_proj [E * D, I]. Every scheme treats each section by itself, so an expert is read and quantized alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from layers.context import StepContext
from layers.grouped_router import GroupedRouter
from layers.linear import declare
from layers.mlp import ACTIVATIONS, GatedMLP, clamped_gated, gated
from layers.model_config import ClampedSwiGLU, MoEConfig
from layers.weights import ParamSpec


class Router(nn.Module):
    """Scores of the experts for each token, and the choice among them."""

    def __init__(self, weight: ParamSpec, config: MoEConfig, bias: ParamSpec | None = None) -> None:
        super().__init__()
        declare(self, weight)
        if bias is not None:
            declare(self, bias)
        self._config = config
        self._has_bias = bias is not None

    def forward(self, x: torch.Tensor, ctx: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, D] -> weights [T, k] in x's dtype, the chosen experts int64 [T, k]."""
        bias = self.get_parameter("bias") if self._has_bias else None
        logits = ctx.kernels.wide(x, self.get_parameter("weight"), bias)
        if self._config.softmax_chosen:
            best, chosen = logits.topk(self._config.top_k, dim=-1)
            return best.softmax(-1), chosen
        scores, chosen = logits.softmax(-1, dtype=torch.float32).topk(self._config.top_k, dim=-1)
        if self._config.renormalize:
            scores = scores / scores.sum(-1, keepdim=True)
        return scores.to(x.dtype), chosen


class ExpertLinear(nn.Module):
    """One projection of every expert: x of one expert's tokens -> its outputs."""

    def __init__(self, weight: ParamSpec, bias: ParamSpec | None = None, *, experts: int) -> None:
        super().__init__()
        declare(self, weight)
        if bias is not None:
            declare(self, bias)
        self._has_bias = bias is not None
        self._scheme, self._names = weight.scheme, tuple(weight.storage())
        parts = len(weight.sections) // experts
        self.sections = weight.section_rows[:parts]  # one expert's; all have the same
        self._kept = weight.kept_rows[: len(weight.kept_rows) // experts]  # as one expert's are kept
        one = weight.scheme.storage(self._kept, weight.shape[1], wide=weight.dtype)
        self._steps = {name: spec.shape[0] for name, spec in one.items()}

    def product(self, x: torch.Tensor, expert: int, ctx: StepContext) -> torch.Tensor:
        """x [n, I] -> [n, the expert's rows]."""
        ctx.check()
        rows = sum(self.sections)
        bias = self.get_parameter("bias").narrow(0, expert * rows, rows) if self._has_bias else None
        return self._scheme.linear(x, self.stored(expert), self._kept, bias, kernels=ctx.kernels)

    def stored(self, expert: int) -> dict[str, torch.Tensor]:
        """Views of what is stored for one expert."""
        tensors = {name: self.get_parameter(name) for name in self._names}
        return {
            name: tensor.narrow(0, expert * self._steps[name], self._steps[name]) for name, tensor in tensors.items()
        }


class Experts(nn.Module):
    """All experts of a layer."""

    def __init__(
        self,
        *,
        gate_up_proj: ExpertLinear,
        down_proj: ExpertLinear,
        activation: str,
        clamped: ClampedSwiGLU | None = None,
    ) -> None:
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self._act = ACTIVATIONS[activation]
        self._clamped = clamped

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x [T, D], weights (x's dtype or float32) and chosen [T, k] -> [T, D]: what experts give, summed in the order
        of their numbers."""
        out = torch.zeros_like(x)
        for expert, tokens, places in routed(chosen):
            gate, up = self.gate_up_proj.product(x[tokens], expert, ctx).split(list(self.gate_up_proj.sections), dim=-1)
            made = self.down_proj.product(self._gated(gate, up), expert, ctx) * weights[tokens, places].unsqueeze(1)
            out.index_add_(0, tokens, made.to(x.dtype))
        return out

    def _gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if self._clamped is None:
            return gated(gate, up, activation=self._act)
        return clamped_gated(gate, up, limit=self._clamped.limit, alpha=self._clamped.alpha)


class SparseMLP(nn.Module):
    """The feed-forward part of a sparse layer. `shared_expert` sees every token; its output is scaled by the sigmoid of
    `shared_expert_gate` [1, D] where there is one."""

    def __init__(
        self,
        *,
        gate: Router | GroupedRouter,
        experts: Experts,
        shared_expert: GatedMLP | None,
        shared_expert_gate: ParamSpec | None,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.shared_expert = shared_expert
        self.shared_expert_gate = None if shared_expert_gate is None else SharedGate(shared_expert_gate)

    def forward(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x [T, D] -> [T, D]."""
        weights, chosen = self.gate(x, ctx)
        out: torch.Tensor = self.experts(x, weights, chosen, ctx)
        if self.shared_expert is None:
            return out
        shared: torch.Tensor = self.shared_expert(x, ctx)
        return out + (shared if self.shared_expert_gate is None else self.shared_expert_gate(x, ctx) * shared)


class SharedGate(nn.Module):
    """How much of the shared expert each token takes."""

    def __init__(self, weight: ParamSpec) -> None:
        super().__init__()
        declare(self, weight)

    def forward(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x [T, D] -> [T, 1]."""
        logits: torch.Tensor = ctx.kernels.wide(x, self.get_parameter("weight"), None)
        return logits.sigmoid()


def routed(chosen: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(expert, its tokens [n], which of each token's choices it is [n]) for each expert that any token chose.

    chosen: int64 [T, k], on any device; read on the host once.
    """
    flat, order = chosen.flatten().sort(stable=True)
    experts, counts = flat.unique_consecutive(return_counts=True)
    tokens, places = order // chosen.shape[1], order % chosen.shape[1]
    first = 0
    for expert, count in zip(experts.tolist(), counts.tolist(), strict=True):
        yield expert, tokens[first : first + count], places[first : first + count]
        first += count

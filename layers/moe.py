"""Sparse feed-forward layers: a router sends each token to a few of many experts; some have an expert for all tokens.

T tokens, D hidden size, E experts, k experts for each token, I an expert's intermediate size. The experts of a layer
are two parameters, whose sections are the experts' own: gate_up_proj [E * 2I, D] (gate and up of expert 0, of expert 1,
...), down_proj [E * D, I]. Every scheme treats each section by itself, so an expert is read and quantized alone.

With several ranks an expert is cut like a dense layer (tensor parallelism), or each rank has some of them whole (expert
parallelism, layers.expert_dispatch).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import nn

from layers.context import StepContext
from layers.expert_dispatch import ExpertPlaces, dispatched
from layers.expert_rows import ExpertRows, by_expert, grouped_product, is_grouped, rows_at_once, weighed
from layers.grouped_router import GroupedRouter
from layers.linear import is_part_of_sum
from layers.mlp import ACTIVATIONS, GatedMLP, clamped_gated, gated
from layers.model_config import ClampedSwiGLU, MoEConfig
from layers.parameters import declare, parameter
from layers.weights import ParamSpec
from quant.dtypes import to_torch


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
        bias = parameter(self, "bias") if self._has_bias else None
        logits = ctx.kernels.wide(x, parameter(self, "weight"), bias)
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
        self.name = weight.name
        self.experts, self.in_features, self.dtype = experts, weight.shape[1], to_torch(weight.dtype)
        self.is_wide = weight.scheme.name == "none"
        self.is_part = is_part_of_sum(weight)
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
        bias = parameter(self, "bias").narrow(0, expert * rows, rows) if self._has_bias else None
        return self._scheme.linear(x, self.stored(expert), self._kept, bias, kernels=ctx.kernels)

    def grouped(self, rows: torch.Tensor, order: ExpertRows) -> torch.Tensor:
        """Of a wide weight: rows [R, I] in the order of their experts, through those -> [R, an expert's rows]."""
        bias = parameter(self, "bias") if self._has_bias else None
        return grouped_product(rows, parameter(self, "weight"), bias, order=order)

    def stored(self, expert: int) -> dict[str, torch.Tensor]:
        """Views of what is stored for one expert."""
        tensors = {name: parameter(self, name) for name in self._names}
        return {
            name: tensor.narrow(0, expert * self._steps[name], self._steps[name]) for name, tensor in tensors.items()
        }


class Experts(nn.Module):
    """The experts of a layer: all of them, or with `places` those that a rank has of what the ranks have together."""

    def __init__(
        self,
        *,
        gate_up_proj: ExpertLinear,
        down_proj: ExpertLinear,
        activation: str,
        clamped: ClampedSwiGLU | None = None,
        places: ExpertPlaces | None = None,
    ) -> None:
        super().__init__()
        self.places = places
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self._act = ACTIVATIONS[activation]
        self._clamped = clamped

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x [T, D], weights (x's dtype or float32) and chosen [T, k] -> [T, D]: what experts give, summed in the order
        of their numbers. With `places` those of all ranks, each of which takes part, without tokens too; else this
        rank's part of a sum where `is_part`."""
        if self.places is not None:

            def apply(rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
                return self._own(rows, experts, ctx)

            return dispatched(x, weights, chosen, places=self.places, groups=ctx.groups, apply=apply)
        if self._is_grouped(x, ctx):
            self._await(chosen, ctx)
            return self.grouped(x, weights, chosen)
        return self._looped(x, weights, chosen, ctx)

    @property
    def is_part(self) -> bool:
        """Whether each rank has a part of every expert, so that their results are to be added over the ranks."""
        return self.down_proj.is_part

    def grouped(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """x [T, D], weights and chosen [T, k] -> [T, D], with wide weights: all experts at once, no loop over them."""
        step = max(1, self._rows_at_once(x) // chosen.shape[1])
        parts = []
        for some, shares, picked in zip(x.split(step), weights.split(step), chosen.split(step), strict=True):
            results = self._all_at_once(some.repeat_interleave(picked.shape[1], 0), picked.flatten())
            parts.append(weighed(results.view(*picked.shape, -1), shares, picked))
        return torch.cat(parts)

    def _looped(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert, tokens, places in self._in_turn(chosen, ctx, x):
            made = self._product(x[tokens], expert, ctx) * weights[tokens, places].unsqueeze(1)
            out.index_add_(0, tokens, made.to(x.dtype))
        return out

    def _own(self, rows: torch.Tensor, experts: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """Rows [R, D] that came here, each for one of this rank's experts [R] -> [R, D]."""
        if self._is_grouped(rows, ctx):
            self._await(experts, ctx)
            step = self._rows_at_once(rows)
            pairs = zip(rows.split(step), experts.split(step), strict=True)
            return torch.cat([self._all_at_once(*pair) for pair in pairs])
        out = torch.empty_like(rows)
        for expert, tokens, _ in self._in_turn(experts.unsqueeze(1), ctx):
            out[tokens] = self._product(rows[tokens], expert, ctx)
        return out

    def _await(self, experts: torch.Tensor, ctx: StepContext) -> None:
        """Wait until these experts are there, all at the same time."""
        if ctx.await_experts is not None:
            deque(ctx.await_experts(self.gate_up_proj.name, experts.unique().tolist()), maxlen=0)

    def _in_turn(
        self, chosen: torch.Tensor, ctx: StepContext, x: torch.Tensor | None = None
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """`routed`, each expert when it is there. `x`: the layer's input, by which others can be foreseen."""
        if ctx.await_experts is None:
            return routed(chosen)
        found = list(routed(chosen))
        there = ctx.await_experts(self.gate_up_proj.name, [expert for expert, _, _ in found])
        if ctx.foresee_experts is not None and x is not None:
            ctx.foresee_experts(self.gate_up_proj.name, x)
        return (one for _, one in zip(there, found, strict=True))

    def _is_grouped(self, x: torch.Tensor, ctx: StepContext) -> bool:
        up, down = self.gate_up_proj, self.down_proj
        sizes = (up.in_features, sum(up.sections), down.in_features, *down.sections)
        wide = up.is_wide and down.is_wide
        return wide and is_grouped(x, sizes, dtype=up.dtype, kernels=ctx.kernels)

    def _rows_at_once(self, x: torch.Tensor) -> int:
        return rows_at_once(max(x.shape[1], sum(self.gate_up_proj.sections)), itemsize=x.element_size())

    def _all_at_once(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Rows [R, D], each through its expert of [R] -> [R, D]."""
        order = by_expert(experts, count=self.gate_up_proj.experts)
        gate, up = self.gate_up_proj.grouped(rows[order.order], order).split(list(self.gate_up_proj.sections), dim=-1)
        out = torch.empty_like(rows)
        out[order.order] = self.down_proj.grouped(self._gated(gate, up), order)
        return out

    def _product(self, x: torch.Tensor, expert: int, ctx: StepContext) -> torch.Tensor:
        """x [n, D] through one expert: [n, D]."""
        gate, up = self.gate_up_proj.product(x, expert, ctx).split(list(self.gate_up_proj.sections), dim=-1)
        return self.down_proj.product(self._gated(gate, up), expert, ctx)

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
        """x [T, D] -> [T, D]. Without tokens of its own a rank still computes others' with its experts."""
        if not x.shape[0]:
            return self._without_tokens(x, ctx)
        weights, chosen = self.gate(x, ctx)
        out: torch.Tensor = self.experts(x, weights, chosen, ctx)
        if self.shared_expert is None:
            return ctx.groups.tensor.all_reduce(out) if self.experts.is_part else out
        if self.experts.is_part:  # and so is the shared expert: one sum for both
            return ctx.groups.tensor.all_reduce(out + self._shared(self.shared_expert.product(x, ctx), x, ctx))
        return out + self._shared(self.shared_expert(x, ctx), x, ctx)

    def _shared(self, made: torch.Tensor, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """What the shared expert gives, times its gate."""
        return made if self.shared_expert_gate is None else self.shared_expert_gate(x, ctx) * made

    def _without_tokens(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        if self.experts.places is None:
            return x
        out: torch.Tensor = self.experts(x, x.new_empty(0, 1), x.new_empty(0, 1, dtype=torch.int64), ctx)
        return out


class SharedGate(nn.Module):
    """How much of the shared expert each token takes."""

    def __init__(self, weight: ParamSpec) -> None:
        super().__init__()
        declare(self, weight)

    def forward(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x [T, D] -> [T, 1]."""
        logits: torch.Tensor = ctx.kernels.wide(x, parameter(self, "weight"), None)
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

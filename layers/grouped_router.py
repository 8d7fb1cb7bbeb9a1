"""The routers of DeepSeek's models: experts are chosen within the best groups, by scores that a bias may correct.

Sources: DeepSeek-AI 2024, arXiv:2405.04434, section 2.2 (groups: one per device there), and arXiv:2412.19437, section
2.1.2 (sigmoids, and the bias that balances the load without weighing in the result). T tokens, D hidden size, E
experts, G groups of them, k experts for each token. All of it is float32, the router's weight included.
"""

from __future__ import annotations

import torch
from torch import nn

from layers.context import StepContext
from layers.mlp import activated
from layers.model_config import GroupedChoice, MoEConfig
from layers.parameters import declare, parameter
from layers.weights import ParamSpec

_LEAST_SUM = 1e-20  # added to the sum of weights that it divides, as the reference does


class GroupedRouter(nn.Module):
    """Scores of the experts for each token, and the choice among them. `bias` [E] is for the choice alone."""

    def __init__(self, weight: ParamSpec, bias: ParamSpec | None, config: MoEConfig, choice: GroupedChoice) -> None:
        super().__init__()
        declare(self, weight)
        if bias is not None:
            declare(self, bias)
        self._config, self._choice, self._has_bias = config, choice, bias is not None

    def forward(self, x: torch.Tensor, ctx: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, D] -> float32 weights [T, k], the chosen experts int64 [T, k]."""
        logits = ctx.kernels.wide(x.float(), parameter(self, "weight"), None)
        scores = activated(logits, activation=torch.sigmoid) if self._choice.sigmoid else logits.softmax(-1)
        ranked = scores + parameter(self, "e_score_correction_bias") if self._has_bias else scores
        chosen = within_best_groups(ranked, self._choice).topk(self._config.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self._config.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
        return weights * self._choice.scale, chosen


def within_best_groups(ranked: torch.Tensor, choice: GroupedChoice) -> torch.Tensor:
    """ranked [T, E], with -inf for the experts of all but the best groups."""
    if choice.groups == 1:
        return ranked
    groups = ranked.unflatten(-1, (choice.groups, -1))  # [T, G, E / G]
    best = groups.topk(choice.summed, dim=-1).values.sum(-1).topk(choice.top_groups, dim=-1).indices
    left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
    kept: torch.Tensor = groups.masked_fill(left_out.unsqueeze(-1), float("-inf"))
    return kept.flatten(1)

"""The two ends of the decoder: token ids to vectors, and vectors to logits. V vocabulary, D hidden size."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional

from layers.context import StepContext
from layers.linear import declare, stored_rows
from layers.weights import ParamSpec
from quant.scheme import Scheme
from quant.sections import rows_at_once
from quant.wide import Wide

# The head's matmul runs over this many rows of the vocabulary at a time, always the same ones: so its bits do not
# depend on how much of it had arrived, and it can begin before its last rows are read. A multiple of every scale
# block's height.
CHUNK_ROWS = 8192


class VocabParallelEmbedding(nn.Module):
    """The embedding table, wide. A tied model's head reads it too."""

    def __init__(self, weight: ParamSpec) -> None:
        super().__init__()
        declare(self, weight)
        self.param_name = weight.name

    def forward(self, token_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """token_ids [T] -> [T, D]. Ids must lie in [0, V)."""
        ctx.check()
        return functional.embedding(token_ids, self.get_parameter("weight"))

    def logits(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """The tied head: x [n, D] -> float32 [n, V]."""
        return project(x, {"weight": self.get_parameter("weight")}, param=self.param_name, scheme=Wide(), ctx=ctx)


class ParallelLMHead(nn.Module):
    """An output projection of its own, wide or quantized."""

    def __init__(self, weight: ParamSpec, bias: ParamSpec | None = None) -> None:
        super().__init__()
        declare(self, weight)
        if bias is not None:
            declare(self, bias)
        self._bias_name = None if bias is None else bias.name
        self.scheme = weight.scheme
        self.param_name = weight.name
        self._stored_names = tuple(weight.storage())

    def stored(self) -> dict[str, torch.Tensor]:
        """The weight's stored tensors by name."""
        return {name: self.get_parameter(name) for name in self._stored_names}

    def logits(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x [n, D] -> float32 [n, V]."""
        bias = None
        if self._bias_name is not None:
            bias = self.get_parameter("bias")
            ctx.await_rows(self._bias_name, bias.shape[0])
        return project(x, self.stored(), bias, param=self.param_name, scheme=self.scheme, ctx=ctx)


def project(
    x: torch.Tensor,
    stored: Mapping[str, torch.Tensor],
    bias: torch.Tensor | None = None,
    *,
    param: str,
    scheme: Scheme,
    ctx: StepContext,
) -> torch.Tensor:
    """x [n, D] times the stored matrix [V, D], plus the bias [V], in chunks of rows in order: float32 [n, V].

    The products are made in x's dtype, as the reference makes them, and widened after.
    """
    rows = stored["weight"].shape[0]
    logits = torch.empty((x.shape[0], rows), dtype=torch.float32, device=x.device)
    step = rows_at_once(CHUNK_ROWS, multiple=scheme.row_multiple)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        ctx.check()
        ctx.await_rows(param, stop)
        added = None if bias is None else bias[start:stop]
        chunk = stored_rows(stored, row_multiple=scheme.row_multiple, start=start, stop=stop)
        logits[:, start:stop] = scheme.linear(x, chunk, (stop - start,), added, kernels=ctx.kernels)
    return logits

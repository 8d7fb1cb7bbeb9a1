"""The two ends of the decoder: token ids to vectors, and vectors to logits. V vocabulary, D hidden size.

With tensor parallelism each rank has a run of the vocabulary's rows: P, a multiple of 64, on all ranks but the last of
those that have any. A token's vector comes from the rank that has its row; logits are gathered from all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from layers.architecture import CHUNK_ROWS as CHUNK_ROWS
from layers.context import StepContext
from layers.cuts import vocabulary_rows
from layers.linear import stored_rows
from layers.parallel import Group
from layers.parameters import declare, parameter
from layers.weights import ParamSpec
from quant.scheme import Scheme
from quant.sections import rows_at_once
from quant.wide import Wide


@dataclass(frozen=True)
class VocabularyRows:
    """Which of the `total` rows of a table a rank has: `count` from `first` on, perhaps none. `is_cut`: whether there
    are other ranks."""

    total: int
    first: int
    count: int
    is_cut: bool

    def embed(self, token_ids: torch.Tensor, table: torch.Tensor, group: Group) -> torch.Tensor:
        """Token ids [T] of the whole vocabulary and the table [count, D] of these rows -> [T, D]."""
        if not self.is_cut:
            return functional.embedding(token_ids, table)
        if not token_ids.shape[0]:
            return table.new_zeros(0, table.shape[1])
        own = token_ids - self.first
        elsewhere = (own < 0) | (own >= self.count)
        if self.count:
            part = functional.embedding(own.masked_fill(elsewhere, 0), table).masked_fill_(elsewhere[:, None], 0)
        else:
            part = table.new_zeros(token_ids.shape[0], table.shape[1])
        return group.all_reduce(part)

    def gather(self, logits: torch.Tensor, group: Group) -> torch.Tensor:
        """Logits [n, count] of these rows -> [n, V], of all ranks' rows. All ranks ask for the same n."""
        if not self.is_cut:
            return logits
        if not logits.shape[0]:
            return logits.new_zeros(0, self.total)
        padding = vocabulary_rows(self.total, group.size) - self.count
        padded = functional.pad(logits, (0, padding), value=float("-inf"))
        return torch.cat(group.all_gather(padded), dim=-1)[:, : self.total]


def rows_of(weight: ParamSpec) -> VocabularyRows:
    """The rows of the vocabulary that a table or head has."""
    if weight.cut is None:
        return VocabularyRows(weight.shape[0], 0, weight.shape[0], is_cut=False)
    return VocabularyRows(weight.cut.whole.shape[0], weight.cut.parts[0].start, weight.shape[0], is_cut=True)


class VocabParallelEmbedding(nn.Module):
    """The embedding table, wide. A tied model's head reads it too."""

    def __init__(self, weight: ParamSpec) -> None:
        super().__init__()
        declare(self, weight)
        self.param_name = weight.name
        self.rows = rows_of(weight)

    def forward(self, token_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """token_ids [T] -> [T, D]. Ids must lie in [0, V)."""
        ctx.check()
        return self.rows.embed(token_ids, parameter(self, "weight"), ctx.groups.tensor)

    def local_logits(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """The tied head: x [n, D] -> float32 logits of this rank's rows."""
        return project(x, {"weight": parameter(self, "weight")}, param=self.param_name, scheme=Wide(), ctx=ctx)


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
        self.rows = rows_of(weight)
        self._stored_names = tuple(weight.storage())

    def stored(self) -> dict[str, torch.Tensor]:
        """The weight's stored tensors by name."""
        return {name: parameter(self, name) for name in self._stored_names}

    def local_logits(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x [n, D] -> float32 logits of this rank's rows."""
        bias = None
        if self._bias_name is not None:
            bias = parameter(self, "bias")
            if bias.shape[0]:
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
        added = None if bias is None else bias[start:stop]
        with _rows(stored, start, stop, param=param, multiple=scheme.row_multiple, ctx=ctx) as chunk:
            logits[:, start:stop] = scheme.linear(x, chunk, (stop - start,), added, kernels=ctx.kernels)
    return logits


@contextmanager
def _rows(
    stored: Mapping[str, torch.Tensor], start: int, stop: int, *, param: str, multiple: int, ctx: StepContext
) -> Iterator[Mapping[str, torch.Tensor]]:
    """What is stored for a chunk of rows, once it is there."""
    leased = nullcontext() if ctx.weights is None else ctx.weights.lease_rows(param, start, stop)
    with leased as chunk:
        if chunk is None:
            ctx.await_rows(param, stop)
            chunk = stored_rows(stored, row_multiple=multiple, start=start, stop=stop)
        yield chunk

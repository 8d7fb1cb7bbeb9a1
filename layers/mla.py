"""Latent attention: a token's keys and values of all heads are kept as one latent (DeepSeek-AI 2024, arXiv:2405.04434).

T tokens of the batch, n of a sequence, S of that sequence with its past; H heads. A latent of R numbers makes a key of
P numbers and a value of V numbers for each head; E rotated numbers of a token are a part of every head's key. What the
cache keeps of a token is [R + E]; wherever several heads' parts lie side by side, a head's stand together.

Scores are q_p . (W_p c) + q_e . k_e for a latent c. They can be had in two ways, equal but for roundings:

- *expanded*: keys W_p c and values W_v c of all S latents are made, then attended to as usual;
- *absorbed*: (W_p^T q_p) . c, with queries taken to where the latents are; what is mixed there of the latents goes
  through W_v afterwards. Nothing is made for past tokens, but each score costs R + E products and not P + E.

So a prompt is expanded and a single token absorbed: `absorbs` compares the products. W_p and W_v are the rows of one
weight, kept wide (its kind is ABSORBED): both forms read it where it lies, from either side, so that nothing has to be
made of it after it has arrived, and nothing is kept twice. Measured: CHANGELOG.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from layers.attention import attend
from layers.batch import Batch, BatchSequence
from layers.context import StepContext
from layers.linear import ColumnParallelLinear, RowParallelLinear
from layers.model_config import MLAConfig
from layers.parameters import declare, parameter
from layers.rotary import Ropes
from layers.weights import ParamSpec
from quant.kernels import Kernels
from quant.panels import Panel, Workspace

LATENT_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is (transformers, modeling_deepseek_v3.py)
EXPANDED_NBYTES = 32 << 20  # of keys and values that are made at once, or one head's where those are more
HEADS_AT_ONCE = 8  # whose products make up one panel


class LatentAttention(nn.Module):
    """The attention of one layer. Queries come of `q_proj`, or of `q_b_proj` after `q_a_proj` and its norm."""

    def __init__(
        self,
        *,
        layer: int,
        sizes: MLAConfig,
        scale: float,
        q_proj: ColumnParallelLinear | None,
        q_a_proj: ColumnParallelLinear | None,
        q_a_layernorm: nn.Module | None,
        q_b_proj: ColumnParallelLinear | None,
        kv_a_proj_with_mqa: ColumnParallelLinear,
        kv_a_layernorm: nn.Module,
        kv_b_proj: LatentUpProjection,
        o_proj: RowParallelLinear,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.sizes = sizes
        self.scale = scale
        self.q_proj = q_proj
        self.q_a_proj = q_a_proj
        self.q_a_layernorm = q_a_layernorm
        self.q_b_proj = q_b_proj
        self.kv_a_proj_with_mqa = kv_a_proj_with_mqa
        self.kv_a_layernorm = kv_a_layernorm
        self.kv_b_proj = kv_b_proj
        self.o_proj = o_proj

    def forward(self, x: torch.Tensor, batch: Batch, ropes: Ropes, ctx: StepContext) -> torch.Tensor:
        """x [T, D] -> [T, D]; each sequence's latents are appended to its cache."""
        sizes, rope = self.sizes, ropes.full
        assert rope is not None
        q = self._queries(x, ctx).unflatten(-1, (-1, sizes.qk_head_dim))  # [T, H, P + E]
        q = torch.cat((q[..., : sizes.qk_nope_head_dim], rope.rotate(q[..., sizes.qk_nope_head_dim :])), dim=-1)
        latent, shared = self.kv_a_proj_with_mqa(x, ctx).split([sizes.kv_lora_rank, sizes.qk_rope_head_dim], dim=-1)
        turned = rope.rotate(shared.unsqueeze(1)).squeeze(1)
        kept = torch.cat((self.kv_a_layernorm(latent), turned), dim=-1)  # [T, R + E]
        mixed = x.new_empty(*q.shape[:-1], sizes.v_head_dim)
        for sequence in batch.sequences:
            rows = slice(sequence.start, sequence.stop)
            sequence.cache.append_latents(self.layer, kept[rows])
            mixed[rows] = self._attend(q[rows].transpose(0, 1), sequence, ctx).transpose(0, 1)
        out: torch.Tensor = self.o_proj(mixed.flatten(1), ctx)
        return out

    def _queries(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x [T, D] -> [T, H * (P + E)]."""
        if self.q_a_proj is not None and self.q_a_layernorm is not None and self.q_b_proj is not None:
            low: torch.Tensor = self.q_a_layernorm(self.q_a_proj(x, ctx))
            out: torch.Tensor = self.q_b_proj(low, ctx)
            return out
        assert self.q_proj is not None
        return self.q_proj.product(x, ctx)

    def _attend(self, q: torch.Tensor, sequence: BatchSequence, ctx: StepContext) -> torch.Tensor:
        """q [H, n, P + E] over all that the sequence's cache holds: [H, n, V]."""
        ctx.check()
        kept = sequence.cache.latents(self.layer, stop=sequence.length)
        if absorbs(self.sizes, count=q.shape[1], length=kept.shape[0]):
            return self._attend_absorbed(q, kept, ctx)
        return self._attend_expanded(q, kept, ctx)

    def _attend_absorbed(self, q: torch.Tensor, kept: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """All heads share the latents as keys, and as values: the E numbers that are no value are mixed along."""
        sizes = self.sizes
        alone, turned = q.split([sizes.qk_nope_head_dim, sizes.qk_rope_head_dim], dim=-1)
        taken = torch.cat((self.kv_b_proj.absorb(alone, ctx.kernels), turned), dim=-1)  # [H, n, R + E]
        mixed = attend(taken, kept[None], kept[None], window=None, scale=self.scale)
        return self.kv_b_proj.values(mixed[..., : sizes.kv_lora_rank], ctx.kernels)

    def _attend_expanded(self, q: torch.Tensor, kept: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """Some heads after the others, so that little is held; a head's bits do not depend on the others."""
        sizes, parts = self.sizes, []
        latent, turned = kept.split([sizes.kv_lora_rank, sizes.qk_rope_head_dim], dim=-1)
        width = max(sizes.qk_head_dim, sizes.v_head_dim)  # torch's fused kernels want keys and values of one width
        nbytes = kept.shape[0] * (sizes.up_head_dim + 2 * width) * kept.element_size()
        step = max(1, EXPANDED_NBYTES // nbytes)
        for first in range(0, q.shape[0], step):
            heads = slice(first, min(first + step, q.shape[0]))
            keys, values = self.kv_b_proj.expand(latent, heads, ctx.kernels)
            shared = turned.expand(keys.shape[0], *turned.shape)
            keys, queries = torch.cat((keys, shared), dim=-1), q[heads]
            queries, keys, values = (_wide(one, width) for one in (queries, keys, values))
            mixed = attend(queries, keys, values, window=None, scale=self.scale)
            parts.append(mixed[..., : sizes.v_head_dim])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def absorbs(sizes: MLAConfig, *, count: int, length: int) -> bool:
    """Whether fewer products are needed in the absorbed form, for `count` new ones of `length` tokens."""
    up = sizes.kv_lora_rank * sizes.up_head_dim
    absorbed = count * (up + length * (sizes.latent_dim + sizes.kv_lora_rank))
    return absorbed < length * (up + count * (sizes.qk_head_dim + sizes.v_head_dim))


class LatentUpProjection(nn.Module):
    """kv_b_proj [H * (P + V), R], wide: what makes keys and values of latents, and what is absorbed."""

    def __init__(self, weight: ParamSpec, *, sizes: MLAConfig) -> None:
        super().__init__()
        declare(self, weight)
        self._sizes = sizes

    def expand(self, latent: torch.Tensor, heads: slice, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        """latent [S, R] -> keys without position [h, S, P] and values [h, S, V] of a run of h heads."""
        rows = self._sizes.up_head_dim
        weight = parameter(self, "weight")[heads.start * rows : heads.stop * rows]
        made = kernels.wide(latent, weight, None).unflatten(-1, (-1, rows)).transpose(0, 1)
        keys, values = made.split([self._sizes.qk_nope_head_dim, self._sizes.v_head_dim], dim=-1)
        return keys, values

    def absorb(self, q: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """q [H, n, P] -> [H, n, R]."""
        return per_head(q, self._by_head()[:, : self._sizes.qk_nope_head_dim], kernels)

    def values(self, mixed: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        """mixed [H, n, R] -> [H, n, V]."""
        return per_head(mixed, self._by_head()[:, self._sizes.qk_nope_head_dim :].transpose(1, 2), kernels)

    def _by_head(self) -> torch.Tensor:
        """[H, P + V, R]."""
        by_head: torch.Tensor = parameter(self, "weight").unflatten(0, (-1, self._sizes.up_head_dim))
        return by_head


def per_head(x: torch.Tensor, weight: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    """x [H, n, a] times weight [H, a, b], each head by itself: [H, n, b] in x's dtype.

    On a CPU in panels of heads (see quant.panels): the bits do not depend on the number of threads.
    """
    if x.device.type != "cpu":
        return torch.bmm(x, weight)
    out = x.new_empty(*x.shape[:-1], weight.shape[-1])
    straight = x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and kernels.features.native_bf16)

    def panel(start: int) -> Panel:
        run = slice(start, start + HEADS_AT_ONCE)
        return lambda workspace: _multiply(x[run], weight[run], out[run], workspace, straight=straight)

    kernels.run([panel(start) for start in range(0, x.shape[0], HEADS_AT_ONCE)])
    return out


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, workspace: Workspace, *, straight: bool
) -> None:
    """In float32 where half precision has no instructions of its own. Head by head else: batched products of strided
    bfloat16 are up to three times slower (measured for H = 16, n from 1 to 64)."""
    if straight:
        for head in range(x.shape[0]):
            torch.mm(x[head], weight[head], out=out[head])
        return
    wide = workspace.take("heads", tuple(weight.shape), torch.float32)
    out.copy_(torch.bmm(x.float(), wide.copy_(weight)))


def _wide(x: torch.Tensor, width: int) -> torch.Tensor:
    """x with zeros up to so many numbers in the last dim."""
    return x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1]))

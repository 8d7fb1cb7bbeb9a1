"""The decoder: a shell of meta parameters that costs milliseconds, and the steps that run once layers are filled.

T tokens, D hidden size, V vocabulary. The caller enters torch.inference_mode, and runs the steps one by one (waiting
for each layer before it) or all of them with `forward`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from layers.architecture import EMBED_WEIGHT, HEAD_WEIGHT, NORM_WEIGHT
from layers.attention import Attention
from layers.batch import Batch
from layers.context import StepContext
from layers.embedding import ParallelLMHead, VocabParallelEmbedding
from layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from layers.mlp import GatedMLP
from layers.model_config import ModelConfig
from layers.norm import RMSNorm
from layers.rotary import Rope, RotaryEmbedding
from layers.weights import LayerSpec, ParamSpec


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind its norm and added to what came in."""

    def __init__(
        self, *, input_layernorm: RMSNorm, self_attn: Attention, post_attention_layernorm: RMSNorm, mlp: GatedMLP
    ) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp

    def forward(self, hidden: torch.Tensor, batch: Batch, rope: Rope, ctx: StepContext) -> torch.Tensor:
        """hidden [T, D] -> [T, D]; the layer's keys and values are appended to the caches."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), batch, rope, ctx)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden), ctx)
        return out


class Trunk(nn.Module):
    """What checkpoints call `model`: the table, the layers, the last norm."""

    def __init__(self, *, embed_tokens: VocabParallelEmbedding, layers: Sequence[DecoderLayer], norm: RMSNorm) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class DecoderModel(nn.Module):
    """A whole decoder. `lm_head` is None where the embedding table is the head."""

    def __init__(self, config: ModelConfig, *, model: Trunk, lm_head: ParallelLMHead | None) -> None:
        super().__init__()
        self.config = config
        self.model = model
        self.lm_head = lm_head
        self.rotary = RotaryEmbedding(config.rope)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers; each is called with (hidden, batch, rope, ctx)."""
        return self.model.layers

    @property
    def dtype(self) -> torch.dtype:
        """The activations' dtype, which is that of the norms."""
        return self.model.norm.get_parameter("weight").dtype

    def embed(self, token_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """token_ids [T] -> [T, D]. Needs the embedding table."""
        hidden: torch.Tensor = self.model.embed_tokens(token_ids, ctx)
        return hidden

    def rope(self, batch: Batch) -> Rope:
        """The angles of this step, for every layer. Needs no parameter; asked for before `batch.advance()`."""
        return self.rotary(batch, dtype=self.dtype)

    def head(self, hidden: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """hidden [n, D] (only the rows that are asked for) -> float32 logits [n, V].

        Rows of the head's parameters are awaited by `ctx.await_rows`, the last norm's included.
        """
        ctx.await_rows(NORM_WEIGHT, self.config.hidden_size)
        normed = self.model.norm(hidden)
        if self.lm_head is None:
            return self.model.embed_tokens.logits(normed, ctx)
        return self.lm_head.logits(normed, ctx)

    def forward(self, batch: Batch, ctx: StepContext, *, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Every step at once: float32 logits [len(rows), V] of those rows of the batch (None: all T of them)."""
        hidden, rope = self.embed(batch.token_ids, ctx), self.rope(batch)
        for layer in self.layers:
            hidden = layer(hidden, batch, rope, ctx)
        logits = self.head(hidden if rows is None else hidden[list(rows)], ctx)
        batch.advance()
        return logits

    def assign(self, name: str, tensor: torch.Tensor) -> None:
        """Put a tensor in the place of the stored parameter `name`. Raises ValueError when shape or dtype differ."""
        declared = self.get_parameter(name)
        if declared.shape != tensor.shape or declared.dtype != tensor.dtype:
            raise ValueError(
                f"{name}: {list(tensor.shape)} {tensor.dtype} given, {list(declared.shape)} {declared.dtype} declared"
            )
        self._replace(name, tensor)

    def release(self, name: str) -> None:
        """Put a meta tensor back in the place of the stored parameter `name`, so that its memory can be reused."""
        declared = self.get_parameter(name)
        self._replace(name, torch.empty(declared.shape, dtype=declared.dtype, device="meta"))

    def _replace(self, name: str, tensor: torch.Tensor) -> None:
        module, _, leaf = name.rpartition(".")
        self.get_submodule(module).register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))


def stored_names(param: ParamSpec) -> tuple[str, ...]:
    """The full names of the parameters that the shell declares for `param`, scales included."""
    module = param.name.rpartition(".")[0]
    return tuple(f"{module}.{stored}" for stored in param.storage())


def build_shell(config: ModelConfig, specs: Sequence[LayerSpec]) -> DecoderModel:
    """The model with every parameter on the meta device: names, shapes and dtypes are those of `specs`."""
    params = {param.name: param for spec in specs for param in spec.params}
    trunk = Trunk(
        embed_tokens=VocabParallelEmbedding(params[EMBED_WEIGHT]),
        layers=[_layer(config, index, params) for index in range(config.num_layers)],
        norm=RMSNorm(params[NORM_WEIGHT], eps=config.rms_norm_eps),
    )
    head = params.get(HEAD_WEIGHT)
    return DecoderModel(config, model=trunk, lm_head=None if head is None else ParallelLMHead(head))


def _layer(config: ModelConfig, index: int, params: Mapping[str, ParamSpec]) -> DecoderLayer:
    prefix, eps = f"model.layers.{index}", config.rms_norm_eps
    attention = Attention(
        layer=index,
        head_dim=config.head_dim,
        window=config.sliding_windows[index],
        qkv_proj=QKVParallelLinear(*_weight_and_bias(params, f"{prefix}.self_attn.qkv_proj")),
        o_proj=RowParallelLinear(*_weight_and_bias(params, f"{prefix}.self_attn.o_proj")),
        q_norm=RMSNorm(params[f"{prefix}.self_attn.q_norm.weight"], eps=eps) if config.qk_norm else None,
        k_norm=RMSNorm(params[f"{prefix}.self_attn.k_norm.weight"], eps=eps) if config.qk_norm else None,
    )
    mlp = GatedMLP(
        gate_up_proj=MergedColumnParallelLinear(*_weight_and_bias(params, f"{prefix}.mlp.gate_up_proj")),
        down_proj=RowParallelLinear(*_weight_and_bias(params, f"{prefix}.mlp.down_proj")),
        activation=config.hidden_act,
    )
    return DecoderLayer(
        input_layernorm=RMSNorm(params[f"{prefix}.input_layernorm.weight"], eps=eps),
        self_attn=attention,
        post_attention_layernorm=RMSNorm(params[f"{prefix}.post_attention_layernorm.weight"], eps=eps),
        mlp=mlp,
    )


def _weight_and_bias(params: Mapping[str, ParamSpec], module: str) -> tuple[ParamSpec, ParamSpec | None]:
    return params[f"{module}.weight"], params.get(f"{module}.bias")

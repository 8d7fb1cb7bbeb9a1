"""The decoder: a shell of meta parameters that costs milliseconds, and the steps that run once layers are filled.

T tokens, D hidden size, V vocabulary. The caller enters torch.inference_mode, and runs the steps one by one (waiting
for each layer before it) or all of them with `forward`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple

import torch
from torch import nn

from layers.architecture import (
    EMBED_WEIGHT,
    HEAD_BIAS,
    HEAD_WEIGHT,
    NORM_BIAS,
    NORM_PLACES,
    NORM_WEIGHT,
    POSITIONS_WEIGHT,
    NormPlaces,
)  # fmt: skip
from layers.attention import Attention, Scores
from layers.batch import Batch
from layers.context import StepContext
from layers.embedding import ParallelLMHead, VocabParallelEmbedding
from layers.expert_dispatch import expert_places
from layers.first_input import LearnedPositions, first_input
from layers.grouped_router import GroupedRouter
from layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from layers.mla import LATENT_EPS, LatentAttention, LatentUpProjection
from layers.mlp import GatedMLP, PlainMLP
from layers.model_config import HeadNorm, MLPKind, ModelConfig, MoEConfig, Residual
from layers.moe import ExpertLinear, Experts, Router, SparseMLP
from layers.norm import LayerNormPerHead, RMSNorm, make_norm
from layers.rotary import Ropes, RotaryEmbedding
from layers.softcap import soft_cap
from layers.topology import Topology
from layers.weights import LayerSpec, ParamKind, ParamSpec
from quant.dtypes import to_torch


class DecoderLayer(nn.Module):
    """Attention and MLP between the norms that `places` names, each added to what came in, times `residual_scale`.

    `embed_scale` and `embed_positions` are the first layer's (see layers.first_input).
    """

    def __init__(
        self,
        *,
        norms: Mapping[str, nn.Module],
        places: NormPlaces,
        parallel: bool,
        self_attn: Attention | LatentAttention,
        mlp: GatedMLP | PlainMLP | SparseMLP,
        residual_scale: float = 1.0,
        embed_scale: float | None = None,
        embed_positions: LearnedPositions | None = None,
    ) -> None:
        super().__init__()
        for name, norm in norms.items():
            self.add_module(name, norm)
        self.places = places
        self.parallel = parallel
        self.self_attn = self_attn
        self.mlp = mlp
        self.residual_scale = residual_scale
        self.embed_scale = embed_scale
        self.embed_positions = embed_positions

    def forward(self, hidden: torch.Tensor, batch: Batch, rope: Ropes, ctx: StepContext) -> torch.Tensor:
        """hidden [T, D] -> [T, D]; the layer's keys and values are appended to the caches.

        Without tokens (this rank's replica has none in this step) only what other ranks need is done.
        """
        if not hidden.shape[0]:
            return self._without_tokens(hidden, ctx)
        hidden = first_input(hidden, batch, scale=self.embed_scale, positions=self.embed_positions)
        normed = self._norm(self.places.before_attention, hidden)
        mixed = self._norm(self.places.after_attention, self.self_attn(normed, batch, rope, ctx))
        if self.parallel:
            return self._add(self._add(hidden, mixed), self.mlp(normed, ctx))
        hidden = self._add(hidden, mixed)
        inner = self.mlp(self._norm(self.places.before_mlp, hidden), ctx)
        return self._add(hidden, self._norm(self.places.after_mlp, inner))

    def _without_tokens(self, hidden: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        if not isinstance(self.mlp, SparseMLP):
            return hidden
        out: torch.Tensor = self.mlp(hidden, ctx)
        return out

    def _norm(self, name: str | None, x: torch.Tensor) -> torch.Tensor:
        if name is None:
            return x
        norm = self._modules[name]
        assert norm is not None
        normed: torch.Tensor = norm(x)
        return normed

    def _add(self, hidden: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        return hidden + (change if self.residual_scale == 1.0 else change * self.residual_scale)


class LayerElsewhere(nn.Module):
    """Stands where a layer of another stage of the pipeline would, so that the others keep their names."""

    def forward(self, *_: object) -> torch.Tensor:
        """Raises RuntimeError."""
        raise RuntimeError("this layer belongs to another stage of the pipeline")


class Trunk(nn.Module):
    """What checkpoints call `model`: the table, the layers, the last norm. Of a pipeline's stages only the first has a
    table (and the last, where it is the head too), only the last a norm."""

    def __init__(
        self,
        *,
        embed_tokens: VocabParallelEmbedding | None,
        layers: Sequence[DecoderLayer | LayerElsewhere],
        norm: nn.Module | None,
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm


class DecoderModel(nn.Module):
    """A whole decoder, or what one of several ranks has of it. `lm_head` is None where the embedding table is the head.
    `dtype` is the activations'."""

    def __init__(
        self, config: ModelConfig, *, model: Trunk, lm_head: ParallelLMHead | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.model = model
        self.lm_head = lm_head
        self.rotary = None if config.rope is None else RotaryEmbedding(config.rope)
        self.local_rotary = None if config.local_rope is None else RotaryEmbedding(config.local_rope)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers; each is called with (hidden, batch, rope, ctx)."""
        return self.model.layers

    def embed(self, token_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """token_ids [T] -> [T, D]. Needs the embedding table."""
        assert self.model.embed_tokens is not None
        hidden: torch.Tensor = self.model.embed_tokens(token_ids, ctx)
        return hidden

    def rope(self, batch: Batch) -> Ropes:
        """The angles of this step, for every layer. Needs no parameter; asked for before `batch.advance()`."""
        if not batch.sequences:
            return Ropes(None, None)
        full = None if self.rotary is None else self.rotary(batch, dtype=self.dtype)
        local = None if self.local_rotary is None else self.local_rotary(batch, dtype=self.dtype)
        return Ropes(full, local)

    def head(self, hidden: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """hidden [n, D] (only the rows that are asked for) -> float32 logits [n, V]."""
        return self.gather_logits(self.local_logits(hidden, ctx), ctx)

    def local_logits(self, hidden: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """hidden [n, D] -> float32 [n, rows of the vocabulary that this rank has], as products. No collective.

        Rows of the head's parameters are awaited by `ctx.await_rows`, the last norm's included.
        """
        config = self.config
        ctx.await_rows(NORM_WEIGHT, config.hidden_size)
        if config.norm_bias:
            ctx.await_rows(NORM_BIAS, config.hidden_size)
        assert self.model.norm is not None
        return self._head.local_logits(self.model.norm(hidden), ctx)

    def gather_logits(self, local: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """What all ranks have made with `local_logits` of the same rows -> float32 logits [n, V], on each of them."""
        config, logits = self.config, self._head.rows.gather(local, ctx.groups.tensor)
        if config.logit_scale != 1.0:
            logits.mul_(config.logit_scale)
        return logits if config.logit_softcap is None else soft_cap(logits, cap=config.logit_softcap)

    @property
    def _head(self) -> VocabParallelEmbedding | ParallelLMHead:
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        assert head is not None
        return head

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


def build_shell(config: ModelConfig, specs: Sequence[LayerSpec], *, topology: Topology | None = None) -> DecoderModel:
    """The model with every parameter on the meta device: names, shapes and dtypes are those of `specs`.

    With a `topology` (None: one rank) they are its rank's own, of `layers.cuts.cut_specs`.
    """
    topology = topology or Topology()
    params = {param.name: param for spec in specs for param in spec.params}
    table, head = params.get(EMBED_WEIGHT), params.get(HEAD_WEIGHT)
    first, stop = topology.layers_of_stage(config.num_layers)
    trunk = Trunk(
        embed_tokens=None if table is None else VocabParallelEmbedding(table),
        layers=[
            _layer(config, index, params, topology) if first <= index < stop else LayerElsewhere()
            for index in range(config.num_layers)
        ],
        norm=_norm(config, params, "model.norm") if NORM_WEIGHT in params else None,
    )
    lm_head = None if head is None else ParallelLMHead(head, params.get(HEAD_BIAS))
    return DecoderModel(config, model=trunk, lm_head=lm_head, dtype=_activations_dtype(params))


def _activations_dtype(params: Mapping[str, ParamSpec]) -> torch.dtype:
    """That of the norms."""
    return to_torch(next(param.dtype for param in params.values() if param.kind is ParamKind.NORM))


def _layer(config: ModelConfig, index: int, params: Mapping[str, ParamSpec], topology: Topology) -> DecoderLayer:
    prefix, places = f"model.layers.{index}", NORM_PLACES[config.residual]
    names = [name for name in astuple(places) if name is not None]
    table = params.get(POSITIONS_WEIGHT) if index == 0 else None
    attention = _attention if config.mla is None else _latent
    cached = index - topology.layers_of_stage(config.num_layers)[0]  # a stage's caches have its own layers alone
    return DecoderLayer(
        norms={name: _norm(config, params, f"{prefix}.{name}") for name in names},
        places=places,
        parallel=config.residual is Residual.PARALLEL,
        self_attn=attention(config, index, params, cached=cached),
        mlp=_feed_forward(config, index, params, topology),
        residual_scale=config.residual_scale,
        embed_scale=config.embed_scale if index == 0 else None,
        embed_positions=None if table is None else LearnedPositions(table),
    )


def _attention(config: ModelConfig, index: int, params: Mapping[str, ParamSpec], *, cached: int) -> Attention:
    module, window = f"model.layers.{index}.self_attn", config.sliding_windows[index]
    return Attention(
        layer=cached,
        head_dim=config.head_dim,
        scores=Scores(window, config.attention_scale, config.attention_softcap),
        local=window is not None and config.local_rope is not None,
        qkv_proj=QKVParallelLinear(*_weight_and_bias(params, f"{module}.qkv_proj")),
        o_proj=RowParallelLinear(*_weight_and_bias(params, f"{module}.o_proj")),
        q_norm=_head_norm(config, params, f"{module}.q_norm") if config.qk_norm else None,
        k_norm=_head_norm(config, params, f"{module}.k_norm") if config.qk_norm else None,
        whole=config.qk_norm_over is HeadNorm.WHOLE,
        sinks=params.get(f"{module}.sinks"),
    )


def _latent(config: ModelConfig, index: int, params: Mapping[str, ParamSpec], *, cached: int) -> LatentAttention:
    module, sizes = f"model.layers.{index}.self_attn", config.mla
    assert sizes is not None
    assert config.attention_scale is not None

    def column(name: str) -> ColumnParallelLinear | None:
        found = f"{module}.{name}.weight" in params
        return ColumnParallelLinear(*_weight_and_bias(params, f"{module}.{name}")) if found else None

    queries = params.get(f"{module}.q_a_layernorm.weight")
    return LatentAttention(
        layer=cached,
        sizes=sizes,
        scale=config.attention_scale,
        q_proj=column("q_proj"),
        q_a_proj=column("q_a_proj"),
        q_a_layernorm=None if queries is None else RMSNorm(queries, eps=LATENT_EPS),
        q_b_proj=column("q_b_proj"),
        kv_a_proj_with_mqa=ColumnParallelLinear(*_weight_and_bias(params, f"{module}.kv_a_proj_with_mqa")),
        kv_a_layernorm=RMSNorm(params[f"{module}.kv_a_layernorm.weight"], eps=LATENT_EPS),
        kv_b_proj=LatentUpProjection(params[f"{module}.kv_b_proj.weight"], sizes=sizes),
        o_proj=RowParallelLinear(*_weight_and_bias(params, f"{module}.o_proj")),
    )


def _feed_forward(
    config: ModelConfig, index: int, params: Mapping[str, ParamSpec], topology: Topology
) -> GatedMLP | PlainMLP | SparseMLP:
    module, moe = f"model.layers.{index}.mlp", config.moe
    if moe is None or not moe.sparse[index]:
        return _mlp(config, params, module)
    shared = _mlp(config, params, f"{module}.shared_expert") if moe.shared_intermediate_size else None
    assert not isinstance(shared, PlainMLP)
    gate_up, down = (_weight_and_bias(params, f"{module}.experts.{name}") for name in ("gate_up_proj", "down_proj"))
    places = expert_places(topology, moe.num_experts) if topology.expert > 1 else None
    held = moe.num_experts if places is None else len(places.held[topology.expert_rank])
    return SparseMLP(
        gate=_router(moe, params, f"{module}.gate"),
        experts=Experts(
            gate_up_proj=ExpertLinear(*gate_up, experts=held),
            down_proj=ExpertLinear(*down, experts=held),
            activation=config.hidden_act,
            clamped=moe.clamped,
            places=places,
        ),
        shared_expert=shared,
        shared_expert_gate=params.get(f"{module}.shared_expert_gate.weight"),
    )


def _router(moe: MoEConfig, params: Mapping[str, ParamSpec], module: str) -> Router | GroupedRouter:
    weight, bias = _weight_and_bias(params, module)
    if moe.grouped is None:
        return Router(weight, moe, bias)
    return GroupedRouter(weight, params.get(f"{module}.e_score_correction_bias"), moe, moe.grouped)


def _mlp(config: ModelConfig, params: Mapping[str, ParamSpec], module: str) -> GatedMLP | PlainMLP:
    if config.mlp is MLPKind.PLAIN:
        return PlainMLP(
            fc1=ColumnParallelLinear(*_weight_and_bias(params, f"{module}.fc1")),
            fc2=RowParallelLinear(*_weight_and_bias(params, f"{module}.fc2")),
            activation=config.hidden_act,
        )
    return GatedMLP(
        gate_up_proj=MergedColumnParallelLinear(*_weight_and_bias(params, f"{module}.gate_up_proj")),
        down_proj=RowParallelLinear(*_weight_and_bias(params, f"{module}.down_proj")),
        activation=config.hidden_act,
    )


def _norm(config: ModelConfig, params: Mapping[str, ParamSpec], module: str) -> nn.Module:
    weight, bias = _weight_and_bias(params, module)
    return make_norm(weight, bias, kind=config.norm, eps=config.rms_norm_eps)


def _head_norm(config: ModelConfig, params: Mapping[str, ParamSpec], module: str) -> nn.Module:
    if config.qk_norm_over in (HeadNorm.OWN, HeadNorm.LISTED):
        return LayerNormPerHead(params[f"{module}.weight"], eps=config.rms_norm_eps)
    return _norm(config, params, module)


def _weight_and_bias(params: Mapping[str, ParamSpec], module: str) -> tuple[ParamSpec, ParamSpec | None]:
    return params[f"{module}.weight"], params.get(f"{module}.bias")

"""The parameters of a decoder, layer by layer, as data: what the loader fills and what the shell declares.

Names are those of Hugging Face checkpoints, with q, k, v and gate, up fused. D hidden size, H heads, I intermediate.
Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from layers.model_config import HeadNorm, MLAConfig, MLPKind, ModelConfig, MoEConfig, Residual
from layers.weights import LayerSpec, ParamKind, ParamSpec, Section, Sharding, Split
from quant.dtypes import DType
from quant.scheme import Scheme

EMBED_WEIGHT = "model.embed_tokens.weight"
HEAD_WEIGHT = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"
NORM_WEIGHT = "model.norm.weight"
NORM_BIAS = "model.norm.bias"
# The first layer adds the positions, so that the table is needed neither for nor before the embedding rows.
POSITIONS_WEIGHT = "model.layers.0.embed_positions.weight"

# The head's matmul runs over this many rows of the vocabulary at a time, always the same ones: so its bits do not
# depend on how much of it had arrived, and it can begin before its last rows are read. A multiple of every scale
# block's height.
CHUNK_ROWS = 8192


WHOLE, ROWS, COLUMNS = Sharding(Split.WHOLE), Sharding(Split.ROWS), Sharding(Split.COLUMNS)
VOCABULARY = Sharding(Split.VOCABULARY)


@dataclass(frozen=True)
class NormPlaces:
    """What the norms of a layer are called, by where they stand; None where there is none."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None


NORM_PLACES = {
    Residual.PRE: NormPlaces(before_attention="input_layernorm", before_mlp="post_attention_layernorm"),
    Residual.POST: NormPlaces(after_attention="post_attention_layernorm", after_mlp="post_feedforward_layernorm"),
    Residual.SANDWICH: NormPlaces(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
    Residual.PARALLEL: NormPlaces(before_attention="input_layernorm"),
}


class SchemeChoice(Protocol):
    """Who decides how a parameter is kept (`quant.policy.QuantPolicy` does)."""

    def scheme_for(self, kind: str, name: str) -> Scheme:
        """The scheme of a parameter of this kind (a ParamKind's value) and name."""
        ...


def layer_specs(
    config: ModelConfig, *, dtype: DType, policy: SchemeChoice, tied: bool | None = None
) -> tuple[LayerSpec, ...]:
    """Every parameter, in the layers "embed", "layers.0" ... "layers.N-1", "head".

    `tied` says whether the checkpoint has one matrix for embedding and head; None takes the configuration's word. A
    tied model's table lies in "head" and "embed" is empty: the table is needed whole only there, at the end (the few
    rows of a prompt are fetched on their own). If the head is then to be quantized, the table stays wide beside a
    stored `lm_head.weight` made from the same checkpoint tensor.
    """
    tied = config.tie_word_embeddings if tied is None else tied
    make = _Params(dtype, policy)
    table = make.plain(EMBED_WEIGHT, (config.vocab_size, config.hidden_size), ParamKind.EMBEDDING, VOCABULARY)
    whole = (Section("", config.vocab_size),)
    head = make.linear(HEAD_WEIGHT, whole, config.hidden_size, ParamKind.HEAD, VOCABULARY)
    head_bias = (make.bias(HEAD_BIAS, whole, VOCABULARY),) if config.head_bias else ()
    norm = tuple(_norm(make, config, "model", "norm"))
    blocks = [LayerSpec(f"layers.{index}", tuple(_block(config, index, make))) for index in range(config.num_layers)]
    if not tied:
        return (LayerSpec("embed", (table,)), *blocks, LayerSpec("head", (*norm, *head_bias, head)))
    last = (*norm, table) if head.scheme.name == "none" else (*norm, table, head)
    return (LayerSpec("embed", ()), *blocks, LayerSpec("head", last))


def is_tied(specs: Iterable[LayerSpec]) -> bool:
    """Whether embedding and head of these specs are one matrix of the checkpoint."""
    return any(spec.name == "head" and any(param.name == EMBED_WEIGHT for param in spec.params) for spec in specs)


def is_optional_bias(name: str, *, specs: Iterable[LayerSpec]) -> bool:
    """Whether `name` (a parameter's, after the weight map) is a bias for a linear weight that has none.

    Some exporters write such biases, all zero; one that is not zero belongs to another model.
    """
    module, _, leaf = name.rpartition(".")
    params = {param.name: param for spec in specs for param in spec.params}
    weight = params.get(f"{module}.weight")
    return leaf == "bias" and name not in params and weight is not None and weight.kind.has_scheme


class _Params:
    """Makes the specs of one model: the dtype and the policy are the same for all of them."""

    def __init__(self, dtype: DType, policy: SchemeChoice) -> None:
        self._dtype = dtype
        self._policy = policy

    def linear(
        self, name: str, sections: tuple[Section, ...], in_features: int, kind: ParamKind, sharding: Sharding
    ) -> ParamSpec:
        return self._spec(name, (sum(section.rows for section in sections), in_features), sections, kind, sharding)

    def bias(self, name: str, sections: tuple[Section, ...], sharding: Sharding) -> ParamSpec:
        return self._spec(name, (sum(section.rows for section in sections),), sections, ParamKind.BIAS, sharding)

    def norm(self, name: str, size: int, sharding: Sharding = WHOLE) -> ParamSpec:
        return self.plain(name, (size,), ParamKind.NORM, sharding)

    def listed_norm(self, name: str, sections: tuple[Section, ...], sharding: Sharding) -> ParamSpec:
        return self._spec(name, (sum(section.rows for section in sections),), sections, ParamKind.NORM, sharding)

    def plain(self, name: str, shape: tuple[int, ...], kind: ParamKind, sharding: Sharding = WHOLE) -> ParamSpec:
        return self._spec(name, shape, (Section("", shape[0]),), kind, sharding)

    def float32(self, name: str, shape: tuple[int, ...], kind: ParamKind) -> ParamSpec:
        """Kept in float32, whatever the model's dtype."""
        return replace(self.plain(name, shape, kind), dtype=DType.F32)

    def _spec(
        self,
        name: str,
        shape: tuple[int, ...],
        sections: tuple[Section, ...],
        kind: ParamKind,
        sharding: Sharding,
    ) -> ParamSpec:
        scheme = self._policy.scheme_for(kind.value, name)
        return ParamSpec(name, shape, sections, kind, self._dtype, scheme, sharding=sharding)


def _block(config: ModelConfig, index: int, make: _Params) -> Iterable[ParamSpec]:
    """One layer's parameters, in the order in which the forward pass meets them."""
    prefix, places = f"model.layers.{index}", NORM_PLACES[config.residual]
    if config.learned_positions and index == 0:
        shape = (config.learned_positions, config.hidden_size)
        yield make.plain(POSITIONS_WEIGHT, shape, ParamKind.POSITIONS)
    yield from _norm(make, config, prefix, places.before_attention)
    if config.mla is not None:
        yield from _latent_attention(make, config, config.mla, f"{prefix}.self_attn")
    else:
        yield from _attention(make, config, f"{prefix}.self_attn")
    yield from _norm(make, config, prefix, places.after_attention)
    yield from _norm(make, config, prefix, places.before_mlp)
    if config.moe is not None and config.moe.sparse[index]:
        yield from _sparse_mlp(make, config, config.moe, f"{prefix}.mlp")
    else:
        yield from _mlp(make, config, f"{prefix}.mlp")
    yield from _norm(make, config, prefix, places.after_mlp)


def _norm(make: _Params, config: ModelConfig, prefix: str, name: str | None) -> Iterable[ParamSpec]:
    if name is None:
        return
    yield make.norm(f"{prefix}.{name}.weight", config.hidden_size)
    if config.norm_bias:
        yield make.bias(f"{prefix}.{name}.bias", (Section("", config.hidden_size),), WHOLE)


def _attention(make: _Params, config: ModelConfig, module: str) -> Iterable[ParamSpec]:
    qkv = (Section("q", config.q_rows), Section("k", config.kv_rows), Section("v", config.kv_rows))
    heads = Sharding(Split.ROWS, (config.num_heads, config.num_kv_heads, config.num_kv_heads))
    yield from _linear(make, f"{module}.qkv_proj", qkv, config.hidden_size, heads, bias=config.qkv_bias)
    if config.qk_norm:
        yield _head_norm(make, config, f"{module}.q_norm.weight", config.num_heads)
        yield _head_norm(make, config, f"{module}.k_norm.weight", config.num_kv_heads)
    if config.attention_sinks:
        yield make.plain(f"{module}.sinks", (config.num_heads,), ParamKind.SINK, _heads(config.num_heads))
    out, mixed = (Section("", config.hidden_size),), Sharding(Split.COLUMNS, (config.num_heads,))
    yield from _linear(make, f"{module}.o_proj", out, config.q_rows, mixed, bias=config.o_bias)


def _latent_attention(make: _Params, config: ModelConfig, mla: MLAConfig, module: str) -> Iterable[ParamSpec]:
    """As DeepSeek's checkpoints call them: `a` goes down to a latent, `b` up to the heads."""
    width, heads, bias = config.hidden_size, config.num_heads, config.qkv_bias
    queries = (Section("", heads * mla.qk_head_dim),)
    if mla.q_lora_rank is None:
        yield from _linear(make, f"{module}.q_proj", queries, width, _heads(heads), bias=False)
    else:
        yield from _linear(make, f"{module}.q_a_proj", (Section("", mla.q_lora_rank),), width, WHOLE, bias=bias)
        yield make.norm(f"{module}.q_a_layernorm.weight", mla.q_lora_rank)
        yield from _linear(make, f"{module}.q_b_proj", queries, mla.q_lora_rank, _heads(heads), bias=False)
    yield from _linear(make, f"{module}.kv_a_proj_with_mqa", (Section("", mla.latent_dim),), width, WHOLE, bias=bias)
    yield make.norm(f"{module}.kv_a_layernorm.weight", mla.kv_lora_rank)
    up = (heads * mla.up_head_dim, mla.kv_lora_rank)
    yield make.plain(f"{module}.kv_b_proj.weight", up, ParamKind.ABSORBED, _heads(heads))
    out, mixed = (Section("", width),), Sharding(Split.COLUMNS, (heads,))
    yield from _linear(make, f"{module}.o_proj", out, heads * mla.v_head_dim, mixed, bias=config.o_bias)


def _head_norm(make: _Params, config: ModelConfig, name: str, heads: int) -> ParamSpec:
    match config.qk_norm_over:
        case HeadNorm.SHARED:
            return make.norm(name, config.head_dim)
        case HeadNorm.OWN:
            return make.plain(name, (heads, config.head_dim), ParamKind.NORM, _heads(heads))
        case HeadNorm.LISTED:
            parts = tuple(Section(str(head), config.head_dim) for head in range(heads))
            return make.listed_norm(name, parts, _heads(heads))
        case HeadNorm.WHOLE:
            return make.norm(name, heads * config.head_dim, _heads(heads))


def _mlp(make: _Params, config: ModelConfig, module: str) -> Iterable[ParamSpec]:
    width, inner = config.hidden_size, config.intermediate_size
    if config.mlp is MLPKind.PLAIN:
        yield from _linear(make, f"{module}.fc1", (Section("", inner),), width, ROWS, bias=config.mlp_bias)
        yield from _linear(make, f"{module}.fc2", (Section("", width),), inner, COLUMNS, bias=config.mlp_bias)
        return
    gate_up = (Section("gate", inner), Section("up", inner))
    yield from _linear(make, f"{module}.gate_up_proj", gate_up, width, ROWS, bias=config.mlp_bias)
    yield from _linear(make, f"{module}.down_proj", (Section("", width),), inner, COLUMNS, bias=config.mlp_bias)


def _sparse_mlp(make: _Params, config: ModelConfig, moe: MoEConfig, module: str) -> Iterable[ParamSpec]:
    """Router and shared expert first: what every token needs."""
    width = config.hidden_size
    if moe.grouped is None:
        yield make.plain(f"{module}.gate.weight", (moe.num_experts, width), ParamKind.ROUTER)
    else:
        yield make.float32(f"{module}.gate.weight", (moe.num_experts, width), ParamKind.ROUTER)
        if moe.grouped.correction_bias:
            yield make.float32(f"{module}.gate.e_score_correction_bias", (moe.num_experts,), ParamKind.ROUTER)
    if moe.router_bias:
        yield make.bias(f"{module}.gate.bias", (Section("", moe.num_experts),), WHOLE)
    if moe.shared_intermediate_size:
        shared = moe.shared_intermediate_size
        gate_up = (Section("gate", shared), Section("up", shared))
        bias, out = config.mlp_bias, (Section("", width),)
        yield from _linear(make, f"{module}.shared_expert.gate_up_proj", gate_up, width, ROWS, bias=bias)
        yield from _linear(make, f"{module}.shared_expert.down_proj", out, shared, COLUMNS, bias=bias)
        if moe.shared_gate:
            yield make.plain(f"{module}.shared_expert_gate.weight", (1, width), ParamKind.ROUTER)
    inner, experts = moe.intermediate_size, range(moe.num_experts)
    rows, columns = (Sharding(split, experts=moe.num_experts) for split in (Split.ROWS, Split.COLUMNS))
    parts = tuple(Section(f"{expert} {part}", inner) for expert in experts for part in ("gate", "up"))
    yield from _linear(make, f"{module}.experts.gate_up_proj", parts, width, rows, bias=moe.expert_bias)
    down = tuple(Section(str(expert), width) for expert in experts)
    yield from _linear(make, f"{module}.experts.down_proj", down, inner, columns, bias=moe.expert_bias)


def _heads(count: int) -> Sharding:
    """Rows that are so many heads."""
    return Sharding(Split.ROWS, (count,))


def _linear(
    make: _Params, module: str, sections: tuple[Section, ...], in_features: int, sharding: Sharding, *, bias: bool
) -> Iterable[ParamSpec]:
    """A weight, and its bias: cut as the outputs are, or added once where those are parts of a sum."""
    yield make.linear(f"{module}.weight", sections, in_features, ParamKind.LINEAR, sharding)
    if bias:
        added = replace(sharding, split=Split.ONCE) if sharding.split is Split.COLUMNS else sharding
        yield make.bias(f"{module}.bias", sections, added)

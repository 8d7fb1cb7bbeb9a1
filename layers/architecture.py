"""The parameters of a decoder, layer by layer, as data: what the loader fills and what the shell declares.

Names are those of Hugging Face checkpoints, with q, k, v and gate, up fused. D hidden size, H heads, I intermediate.
Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from layers.model_config import ModelConfig
from layers.weights import LayerSpec, ParamKind, ParamSpec, Section
from quant.dtypes import DType
from quant.scheme import Scheme

EMBED_WEIGHT = "model.embed_tokens.weight"
HEAD_WEIGHT = "lm_head.weight"
NORM_WEIGHT = "model.norm.weight"


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
    table = make.plain(EMBED_WEIGHT, (config.vocab_size, config.hidden_size), ParamKind.EMBEDDING)
    head = make.linear(HEAD_WEIGHT, (Section("", config.vocab_size),), config.hidden_size, ParamKind.HEAD)
    norm = make.norm(NORM_WEIGHT, config.hidden_size)
    blocks = [LayerSpec(f"layers.{index}", tuple(_block(config, index, make))) for index in range(config.num_layers)]
    if not tied:
        return (LayerSpec("embed", (table,)), *blocks, LayerSpec("head", (norm, head)))
    last = (norm, table) if head.scheme.name == "none" else (norm, table, head)
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
    return leaf == "bias" and name not in params and weight is not None and weight.kind in _LINEAR_KINDS


_LINEAR_KINDS = (ParamKind.LINEAR, ParamKind.HEAD)


class _Params:
    """Makes the specs of one model: the dtype and the policy are the same for all of them."""

    def __init__(self, dtype: DType, policy: SchemeChoice) -> None:
        self._dtype = dtype
        self._policy = policy

    def linear(self, name: str, sections: tuple[Section, ...], in_features: int, kind: ParamKind) -> ParamSpec:
        return self._spec(name, (sum(section.rows for section in sections), in_features), sections, kind)

    def bias(self, name: str, sections: tuple[Section, ...]) -> ParamSpec:
        return self._spec(name, (sum(section.rows for section in sections),), sections, ParamKind.BIAS)

    def norm(self, name: str, size: int) -> ParamSpec:
        return self.plain(name, (size,), ParamKind.NORM)

    def plain(self, name: str, shape: tuple[int, ...], kind: ParamKind) -> ParamSpec:
        return self._spec(name, shape, (Section("", shape[0]),), kind)

    def _spec(self, name: str, shape: tuple[int, ...], sections: tuple[Section, ...], kind: ParamKind) -> ParamSpec:
        scheme = self._policy.scheme_for(kind.value, name)
        return ParamSpec(name, shape, sections, kind, self._dtype, scheme)


def _block(config: ModelConfig, index: int, make: _Params) -> Iterable[ParamSpec]:
    """One layer's parameters, in the order in which the forward pass meets them."""
    prefix, width = f"model.layers.{index}", config.hidden_size
    yield make.norm(f"{prefix}.input_layernorm.weight", width)
    qkv = (Section("q", config.q_rows), Section("k", config.kv_rows), Section("v", config.kv_rows))
    yield from _linear(make, f"{prefix}.self_attn.qkv_proj", qkv, width, bias=config.qkv_bias)
    if config.qk_norm:
        yield make.norm(f"{prefix}.self_attn.q_norm.weight", config.head_dim)
        yield make.norm(f"{prefix}.self_attn.k_norm.weight", config.head_dim)
    out = (Section("", width),)
    yield from _linear(make, f"{prefix}.self_attn.o_proj", out, config.q_rows, bias=config.o_bias)
    yield make.norm(f"{prefix}.post_attention_layernorm.weight", width)
    gate_up = (Section("gate", config.intermediate_size), Section("up", config.intermediate_size))
    yield from _linear(make, f"{prefix}.mlp.gate_up_proj", gate_up, width, bias=config.mlp_bias)
    yield from _linear(make, f"{prefix}.mlp.down_proj", out, config.intermediate_size, bias=config.mlp_bias)


def _linear(
    make: _Params, module: str, sections: tuple[Section, ...], in_features: int, *, bias: bool
) -> Iterable[ParamSpec]:
    yield make.linear(f"{module}.weight", sections, in_features, ParamKind.LINEAR)
    if bias:
        yield make.bias(f"{module}.bias", sections)

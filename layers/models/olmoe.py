"""OLMoE: experts in every layer; queries and keys are normed over all heads together."""

from __future__ import annotations

from dataclasses import replace

from layers.config_fields import Fields
from layers.decoder_config import Biases, Defaults, read_decoder, read_heads, read_windows
from layers.errors import ModelConfigError
from layers.family import Family
from layers.model_config import HeadNorm, ModelConfig
from layers.moe_config import read_moe
from layers.rope_config import read_rope
from layers.weight_rules import expert_weight_map

DEFAULTS = Defaults(rms_norm_eps=1e-5, max_position_embeddings=4096, bos_token_id=None, eos_token_id=50_279)


def read_config(fields: Fields) -> ModelConfig:
    """`intermediate_size` is the experts'. Queries, keys and values are not clipped: `clip_qkv` must be absent."""
    if fields.optional_number("clip_qkv") is not None:
        raise ModelConfigError(f"{fields.where}: clip_qkv is {fields.raw['clip_qkv']!r}; only null is supported")
    heads = read_heads(fields)
    bias = fields.flag("attention_bias", default=False)
    length = fields.positive_int("max_position_embeddings", default=DEFAULTS.max_position_embeddings)
    config = read_decoder(
        fields,
        model_type=FAMILY.model_type,
        architecture=FAMILY.architectures[0],
        heads=heads,
        rope=read_rope(fields, head_dim=heads.head_dim, max_position_embeddings=length),
        defaults=DEFAULTS,
        biases=Biases(qkv=bias, o=bias),
        windows=read_windows(fields, window=None),
        qk_norm=True,
    )
    renormalize = fields.flag("norm_topk_prob", default=False)
    size = config.intermediate_size
    moe = read_moe(fields, experts=64, top_k=8, intermediate_size=size, renormalize=renormalize)
    return replace(config, qk_norm_over=HeadNorm.WHOLE, moe=moe)


FAMILY = Family("olmoe", ("OlmoeForCausalLM",), read_config, expert_weight_map)

"""Llama 2 and 3, and what shares their form (SmolLM2)."""

from __future__ import annotations

from layers.config_fields import Fields
from layers.decoder_config import Biases, Defaults, read_decoder, read_depth, read_heads
from layers.family import Family
from layers.model_config import ModelConfig
from layers.rope_config import read_rope
from layers.weight_rules import decoder_weight_map

DEFAULTS = Defaults(rms_norm_eps=1e-6, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2)


def read_config(fields: Fields) -> ModelConfig:
    """`attention_bias` is for all four projections of the attention, `mlp_bias` for all three of the MLP."""
    heads = read_heads(fields)
    length = fields.positive_int("max_position_embeddings", default=DEFAULTS.max_position_embeddings)
    attention_bias = fields.flag("attention_bias", default=False)
    return read_decoder(
        fields,
        model_type=FAMILY.model_type,
        architecture=FAMILY.architectures[0],
        heads=heads,
        rope=read_rope(fields, head_dim=heads.head_dim, max_position_embeddings=length),
        defaults=DEFAULTS,
        biases=Biases(qkv=attention_bias, o=attention_bias, mlp=fields.flag("mlp_bias", default=False)),
        windows=(None,) * read_depth(fields),
    )


FAMILY = Family("llama", ("LlamaForCausalLM", "LLaMAForCausalLM"), read_config, decoder_weight_map)

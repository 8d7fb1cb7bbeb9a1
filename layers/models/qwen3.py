"""Qwen 3, dense: heads of their own width, a norm on each query and key head, no biases unless asked for."""

from __future__ import annotations

from layers.config_fields import Fields
from layers.decoder_config import Biases, Defaults, read_decoder, read_heads
from layers.family import Family
from layers.model_config import ModelConfig
from layers.models.qwen2 import DEFAULT_KV_HEADS, read_qwen_windows
from layers.rope_config import read_rope
from layers.weight_rules import decoder_weight_map

DEFAULTS = Defaults(rms_norm_eps=1e-6, max_position_embeddings=32_768, bos_token_id=None, eos_token_id=None)
DEFAULT_HEAD_DIM = 128


def read_config(fields: Fields) -> ModelConfig:
    """`head_dim` is 128 where it is absent, whatever the hidden size."""
    heads = read_heads(fields, kv_default=DEFAULT_KV_HEADS, head_dim_default=DEFAULT_HEAD_DIM)
    length = fields.positive_int("max_position_embeddings", default=DEFAULTS.max_position_embeddings)
    attention_bias = fields.flag("attention_bias", default=False)
    return read_decoder(
        fields,
        model_type=FAMILY.model_type,
        architecture=FAMILY.architectures[0],
        heads=heads,
        rope=read_rope(fields, head_dim=heads.head_dim, max_position_embeddings=length),
        defaults=DEFAULTS,
        biases=Biases(qkv=attention_bias, o=attention_bias),
        windows=read_qwen_windows(fields),
        qk_norm=True,
    )


FAMILY = Family("qwen3", ("Qwen3ForCausalLM",), read_config, decoder_weight_map)

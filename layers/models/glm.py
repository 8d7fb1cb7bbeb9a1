"""GLM: half of each head is rotated, by pairs that lie side by side; gate and up are fused on disk."""

from __future__ import annotations

from dataclasses import replace

from layers.config_fields import Fields
from layers.decoder_config import Biases, Defaults, read_decoder, read_depth, read_heads, read_length
from layers.family import Family
from layers.model_config import ModelConfig
from layers.rope_config import read_rope
from layers.weight_rules import decoder_weight_map

DEFAULTS = Defaults(
    rms_norm_eps=1.5625e-07, max_position_embeddings=131_072, bos_token_id=None,
    eos_token_id=(151_329, 151_336, 151_338),
)  # fmt: skip
DEFAULT_KV_HEADS = 2
DEFAULT_HEAD_DIM = 128
DEFAULT_ROTATED = 0.5


def read_config(fields: Fields) -> ModelConfig:
    """GLM's configuration."""
    return read_glm(fields, FAMILY)


def read_glm(fields: Fields, family: Family) -> ModelConfig:
    """`attention_bias` (on unless it is switched off) is for q, k and v only."""
    heads = read_heads(fields, kv_default=DEFAULT_KV_HEADS, head_dim_default=DEFAULT_HEAD_DIM)
    length = read_length(fields, DEFAULTS)
    rope = read_rope(fields, head_dim=heads.head_dim, max_position_embeddings=length, partial_default=DEFAULT_ROTATED)
    return read_decoder(
        fields,
        model_type=family.model_type,
        architecture=family.architectures[0],
        heads=heads,
        rope=replace(rope, interleaved=True),
        defaults=DEFAULTS,
        biases=Biases(qkv=fields.flag("attention_bias", default=True)),
        windows=(None,) * read_depth(fields),
    )


FAMILY = Family("glm", ("GlmForCausalLM",), read_config, decoder_weight_map)

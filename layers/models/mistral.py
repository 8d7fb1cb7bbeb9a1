"""Mistral 7B and its relatives: Llama's form with a sliding window."""

from __future__ import annotations

from layers.config_fields import Fields
from layers.decoder_config import Biases, Defaults, read_decoder, read_heads, read_windows
from layers.family import Family
from layers.model_config import ModelConfig
from layers.rope_config import read_rope
from layers.weight_rules import decoder_weight_map

DEFAULTS = Defaults(rms_norm_eps=1e-6, max_position_embeddings=131_072, bos_token_id=1, eos_token_id=2)
DEFAULT_WINDOW = 4096
DEFAULT_KV_HEADS = 8


def read_config(fields: Fields) -> ModelConfig:
    """A `sliding_window` that is absent is 4096 (v0.1 was trained with it); null is none (v0.2 and later)."""
    heads = read_heads(fields, kv_default=DEFAULT_KV_HEADS)
    length = fields.positive_int("max_position_embeddings", default=DEFAULTS.max_position_embeddings)
    window = fields.optional_int("sliding_window") if fields.has("sliding_window") else DEFAULT_WINDOW
    return read_decoder(
        fields,
        model_type=FAMILY.model_type,
        architecture=FAMILY.architectures[0],
        heads=heads,
        rope=read_rope(fields, head_dim=heads.head_dim, max_position_embeddings=length),
        defaults=DEFAULTS,
        biases=Biases(),
        windows=read_windows(fields, window=window),
    )


FAMILY = Family("mistral", ("MistralForCausalLM",), read_config, decoder_weight_map)

"""Phi-3, Phi-3.5-mini and Phi-4-mini: Llama's form, fused on disk, LongRoPE, and (Phi-4-mini) partly rotated heads."""

from __future__ import annotations

from layers.config_fields import Fields
from layers.decoder_config import Biases, Defaults, read_decoder, read_heads, read_windows
from layers.family import Family
from layers.model_config import ModelConfig
from layers.rope_config import ALIASES, read_rope
from layers.weight_rules import decoder_weight_map

DEFAULTS = Defaults(rms_norm_eps=1e-5, max_position_embeddings=4096, bos_token_id=1, eos_token_id=32_000)
DEFAULT_ORIGINAL_LENGTH = 4096


def read_config(fields: Fields) -> ModelConfig:
    """Early files call LongRoPE "su" or "yarn"; both hold its two lists of factors."""
    heads = read_heads(fields)
    length = fields.positive_int("max_position_embeddings", default=DEFAULTS.max_position_embeddings)
    rope = read_rope(
        fields,
        head_dim=heads.head_dim,
        max_position_embeddings=length,
        original_default=DEFAULT_ORIGINAL_LENGTH,
        aliases={**ALIASES, "yarn": "longrope"},
    )
    return read_decoder(
        fields,
        model_type=FAMILY.model_type,
        architecture=FAMILY.architectures[0],
        heads=heads,
        rope=rope,
        defaults=DEFAULTS,
        biases=Biases(),
        windows=read_windows(fields, window=fields.optional_int("sliding_window")),
    )


FAMILY = Family("phi3", ("Phi3ForCausalLM",), read_config, decoder_weight_map)

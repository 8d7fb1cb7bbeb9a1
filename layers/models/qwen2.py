"""Qwen 2 and 2.5: biases on q, k and v; a window on the layers from `max_window_layers` on, where it is switched on."""

from __future__ import annotations

from layers.config_fields import Fields
from layers.decoder_config import Biases, Defaults, read_decoder, read_heads, read_windows
from layers.family import Family
from layers.model_config import ModelConfig
from layers.rope_config import read_rope
from layers.weight_rules import decoder_weight_map

DEFAULTS = Defaults(rms_norm_eps=1e-6, max_position_embeddings=32_768, bos_token_id=None, eos_token_id=None)
DEFAULT_WINDOW = 4096
DEFAULT_FULL_LAYERS = 28
DEFAULT_KV_HEADS = 32


def read_config(fields: Fields) -> ModelConfig:
    """The biases are the family's, not the configuration's."""
    heads = read_heads(fields, kv_default=DEFAULT_KV_HEADS)
    length = fields.positive_int("max_position_embeddings", default=DEFAULTS.max_position_embeddings)
    return read_decoder(
        fields,
        model_type=FAMILY.model_type,
        architecture=FAMILY.architectures[0],
        heads=heads,
        rope=read_rope(fields, head_dim=heads.head_dim, max_position_embeddings=length),
        defaults=DEFAULTS,
        biases=Biases(qkv=True),
        windows=read_qwen_windows(fields),
    )


def read_qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """A window counts only under `use_sliding_window`, and only from layer `max_window_layers` on."""
    window = fields.optional_int("sliding_window") if fields.has("sliding_window") else DEFAULT_WINDOW
    first = fields.optional_int("max_window_layers", least=0)
    return read_windows(
        fields,
        window=window if fields.flag("use_sliding_window", default=False) else None,
        first=DEFAULT_FULL_LAYERS if first is None else first,
    )


FAMILY = Family("qwen2", ("Qwen2ForCausalLM",), read_config, decoder_weight_map)

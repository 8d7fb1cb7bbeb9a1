"""Gemma 3, its text part: Gemma 2's form with norms of queries and keys instead of caps, and two rotary bases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from layers.config_fields import Fields
from layers.decoder_config import Defaults, read_heads, read_length, read_windows
from layers.family import Family
from layers.model_config import ModelConfig, Residual, RopeConfig
from layers.models.gemma import read_gemma
from layers.models.gemma2 import (
    DEFAULT_HEAD_DIM,
    DEFAULT_KV_HEADS,
    read_attention_scale,
    read_cap,
    read_gemma_window,
)  # fmt: skip
from layers.rope_config import read_rope
from layers.weight_rules import decoder_weight_map

DEFAULTS = Defaults(
    rms_norm_eps=1e-6, max_position_embeddings=131_072, bos_token_id=2, eos_token_id=1, tie_word_embeddings=True,
    hidden_act="gelu_pytorch_tanh",
)  # fmt: skip
DEFAULT_PATTERN = 6
DEFAULT_THETA = 1_000_000.0
DEFAULT_LOCAL_THETA = 10_000.0


def read_config(fields: Fields) -> ModelConfig:
    """Every `sliding_window_pattern`-th layer sees everything and rotates by `rope_theta` and `rope_scaling`; the
    others have the window and rotate by `rope_local_base_freq`, unscaled."""
    fields = fields.renamed({"hidden_act": "hidden_activation"})
    heads = read_heads(fields, kv_default=DEFAULT_KV_HEADS, head_dim_default=DEFAULT_HEAD_DIM)
    length = read_length(fields, DEFAULTS)
    rope, local_rope = _read_ropes(fields, head_dim=heads.head_dim, length=length)
    pattern = fields.optional_int("sliding_window_pattern") or DEFAULT_PATTERN
    windows = read_windows(fields, window=read_gemma_window(fields), full_every=pattern)
    config = read_gemma(fields, FAMILY, heads=heads, rope=rope, defaults=DEFAULTS, windows=windows, qk_norm=True)
    return replace(
        config,
        residual=Residual.SANDWICH,
        local_rope=local_rope,
        attention_scale=read_attention_scale(fields),
        attention_softcap=read_cap(fields, "attn_logit_softcapping", default=None),
        logit_softcap=read_cap(fields, "final_logit_softcapping", default=None),
    )


def _read_ropes(fields: Fields, *, head_dim: int, length: int) -> tuple[RopeConfig, RopeConfig]:
    """Those of layers that see everything and of those with a window: new files hold both in `rope_parameters`, by the
    kind of layer; old ones have keys of their own for the second."""
    given = fields.section("rope_parameters")
    nested = any(isinstance(value, Mapping) for value in given.values())
    full, local = (given.get("full_attention"), given.get("sliding_attention")) if nested else (given or None, None)
    local_theta = fields.raw.get("rope_local_base_freq")
    beside = {"rope_scaling": None, "rope_theta": local_theta}
    read_full = fields.changed({"rope_parameters": full})
    read_local = fields.renamed({"rope_theta": "rope_local_base_freq"}).changed({"rope_parameters": local, **beside})
    return (
        read_rope(read_full, head_dim=head_dim, max_position_embeddings=length, theta_default=DEFAULT_THETA),
        read_rope(read_local, head_dim=head_dim, max_position_embeddings=length, theta_default=DEFAULT_LOCAL_THETA),
    )


FAMILY = Family("gemma3_text", ("Gemma3ForCausalLM",), read_config, decoder_weight_map)

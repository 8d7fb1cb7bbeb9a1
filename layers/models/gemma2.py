"""Gemma 2: Gemma's form with norms around attention and MLP, capped scores and logits, windows in every other layer."""

from __future__ import annotations

from dataclasses import replace

from layers.config_fields import Fields
from layers.decoder_config import Defaults, read_heads, read_length, read_windows
from layers.family import Family
from layers.model_config import ModelConfig, Residual
from layers.models.gemma import read_gemma
from layers.rope_config import read_rope
from layers.weight_rules import decoder_weight_map

DEFAULTS = Defaults(
    rms_norm_eps=1e-6, max_position_embeddings=8192, bos_token_id=2, eos_token_id=1, tie_word_embeddings=True,
    hidden_act="gelu_pytorch_tanh",
)  # fmt: skip
DEFAULT_KV_HEADS = 4
DEFAULT_HEAD_DIM = 256
DEFAULT_WINDOW = 4096
DEFAULT_SCALAR = 256.0
DEFAULT_ATTENTION_CAP = 50.0
DEFAULT_LOGIT_CAP = 30.0


def read_config(fields: Fields) -> ModelConfig:
    """The first layer and every second one from there have the window. A cap that is null caps nothing."""
    fields = fields.renamed({"hidden_act": "hidden_activation"})
    heads = read_heads(fields, kv_default=DEFAULT_KV_HEADS, head_dim_default=DEFAULT_HEAD_DIM)
    length = read_length(fields, DEFAULTS)
    rope = read_rope(fields, head_dim=heads.head_dim, max_position_embeddings=length)
    windows = read_windows(fields, window=read_gemma_window(fields), full_every=2)
    config = read_gemma(fields, FAMILY, heads=heads, rope=rope, defaults=DEFAULTS, windows=windows)
    return replace(
        config,
        residual=Residual.SANDWICH,
        attention_scale=read_attention_scale(fields),
        attention_softcap=read_cap(fields, "attn_logit_softcapping", default=DEFAULT_ATTENTION_CAP),
        logit_softcap=read_cap(fields, "final_logit_softcapping", default=DEFAULT_LOGIT_CAP),
    )


def read_gemma_window(fields: Fields) -> int | None:
    """`sliding_window`, 4096 where it is absent."""
    return fields.optional_int("sliding_window") if fields.has("sliding_window") else DEFAULT_WINDOW


def read_attention_scale(fields: Fields) -> float:
    """1 / sqrt(`query_pre_attn_scalar`), which need not be the width of a head."""
    return float(fields.number("query_pre_attn_scalar", default=DEFAULT_SCALAR) ** -0.5)


def read_cap(fields: Fields, key: str, *, default: float | None) -> float | None:
    """A softcap; null is none."""
    return fields.optional_number(key) if fields.has(key) else default


FAMILY = Family("gemma2", ("Gemma2ForCausalLM",), read_config, decoder_weight_map)

"""Gemma: scaled embeddings, norms whose weights count from 1, wide heads. What later versions share stands here."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

from layers.config_fields import Fields
from layers.decoder_config import Biases, Defaults, Heads, read_decoder, read_depth, read_heads, read_length
from layers.errors import ModelConfigError
from layers.family import Family
from layers.model_config import ModelConfig, NormKind, RopeConfig
from layers.rope_config import read_rope
from layers.weight_rules import decoder_weight_map

DEFAULTS = Defaults(
    rms_norm_eps=1e-6, max_position_embeddings=8192, bos_token_id=2, eos_token_id=1, tie_word_embeddings=True,
    hidden_act="gelu_pytorch_tanh",
)  # fmt: skip
DEFAULT_KV_HEADS = 16
DEFAULT_HEAD_DIM = 256


def read_config(fields: Fields) -> ModelConfig:
    """`hidden_act` "gelu" of the first files means the tanh form, with which the model was trained."""
    if fields.raw.get("hidden_activation") is not None:
        fields = fields.renamed({"hidden_act": "hidden_activation"})
    elif fields.raw.get("hidden_act") == "gelu":
        fields = fields.changed({"hidden_act": "gelu_pytorch_tanh"})
    heads = read_heads(fields, kv_default=DEFAULT_KV_HEADS, head_dim_default=DEFAULT_HEAD_DIM)
    length = read_length(fields, DEFAULTS)
    rope = read_rope(fields, head_dim=heads.head_dim, max_position_embeddings=length)
    windows = (None,) * read_depth(fields)
    return read_gemma(fields, FAMILY, heads=heads, rope=rope, defaults=DEFAULTS, windows=windows)


def read_gemma(
    fields: Fields,
    family: Family,
    *,
    heads: Heads,
    rope: RopeConfig,
    defaults: Defaults,
    windows: tuple[int | None, ...],
    qk_norm: bool = False,
) -> ModelConfig:
    """What all versions share. `attention_bias` is for all four projections of the attention."""
    if fields.raw.get("use_bidirectional_attention") not in (None, False):
        raise ModelConfigError(f"{fields.where}: use_bidirectional_attention is not supported: attention is causal")
    attention_bias = fields.flag("attention_bias", default=False)
    config = read_decoder(
        fields,
        model_type=family.model_type,
        architecture=family.architectures[0],
        heads=heads,
        rope=rope,
        defaults=defaults,
        biases=Biases(qkv=attention_bias, o=attention_bias),
        windows=windows,
        qk_norm=qk_norm,
    )
    return replace(config, norm=NormKind.RMS_PLUS_ONE, embed_scale=sqrt(config.hidden_size))


FAMILY = Family("gemma", ("GemmaForCausalLM",), read_config, decoder_weight_map)

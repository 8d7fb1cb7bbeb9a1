"""Cohere's Command R: one layer norm without a bias for attention and MLP, interleaved rotation, scaled logits."""

from __future__ import annotations

from dataclasses import replace

from layers.config_fields import Fields
from layers.decoder_config import Biases, Defaults, read_decoder, read_depth, read_heads, read_length
from layers.family import Family
from layers.model_config import HeadNorm, ModelConfig, NormKind, Residual
from layers.rope_config import read_rope
from layers.weight_rules import decoder_weight_map

DEFAULTS = Defaults(
    rms_norm_eps=1e-5, max_position_embeddings=8192, bos_token_id=5, eos_token_id=255_001, tie_word_embeddings=True
)
DEFAULT_THETA = 500_000.0
DEFAULT_LOGIT_SCALE = 0.0625


def read_config(fields: Fields) -> ModelConfig:
    """`use_qk_norm` gives each head a norm with a weight of its own; `attention_bias` is for all four projections."""
    fields = fields.renamed({"rms_norm_eps": "layer_norm_eps"})
    heads = read_heads(fields)
    rope = read_rope(
        fields,
        head_dim=heads.head_dim,
        max_position_embeddings=read_length(fields, DEFAULTS),
        theta_default=DEFAULT_THETA,
    )
    attention_bias = fields.flag("attention_bias", default=False)
    return replace(
        read_decoder(
            fields,
            model_type=FAMILY.model_type,
            architecture=FAMILY.architectures[0],
            heads=heads,
            rope=replace(rope, interleaved=True),
            defaults=DEFAULTS,
            biases=Biases(qkv=attention_bias, o=attention_bias),
            windows=(None,) * read_depth(fields),
            qk_norm=fields.flag("use_qk_norm", default=False),
        ),
        norm=NormKind.LAYER,
        qk_norm_over=HeadNorm.OWN,
        residual=Residual.PARALLEL,
        logit_scale=fields.number("logit_scale", default=DEFAULT_LOGIT_SCALE),
    )


FAMILY = Family("cohere", ("CohereForCausalLM",), read_config, decoder_weight_map)

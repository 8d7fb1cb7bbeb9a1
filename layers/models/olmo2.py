"""OLMo 2: norms behind attention and MLP instead of before them, and one over all query heads and all key heads."""

from __future__ import annotations

from dataclasses import replace

from layers.config_fields import Fields
from layers.decoder_config import Biases, Defaults, read_decoder, read_depth, read_heads, read_length
from layers.family import Family
from layers.model_config import HeadNorm, ModelConfig, NormKind, Residual
from layers.rope_config import read_rope
from layers.weight_rules import decoder_weight_map

DEFAULTS = Defaults(rms_norm_eps=1e-5, max_position_embeddings=2048, bos_token_id=None, eos_token_id=50_279)


def read_config(fields: Fields) -> ModelConfig:
    """`attention_bias` is for all four projections of the attention."""
    heads = read_heads(fields)
    length = read_length(fields, DEFAULTS)
    attention_bias = fields.flag("attention_bias", default=False)
    return replace(
        read_decoder(
            fields,
            model_type=FAMILY.model_type,
            architecture=FAMILY.architectures[0],
            heads=heads,
            rope=read_rope(fields, head_dim=heads.head_dim, max_position_embeddings=length),
            defaults=DEFAULTS,
            biases=Biases(qkv=attention_bias, o=attention_bias),
            windows=(None,) * read_depth(fields),
            qk_norm=True,
        ),
        norm=NormKind.RMS_FLOAT32,
        qk_norm_over=HeadNorm.WHOLE,
        residual=Residual.POST,
    )


FAMILY = Family("olmo2", ("Olmo2ForCausalLM",), read_config, decoder_weight_map)

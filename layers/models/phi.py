"""Phi 1, 1.5 and 2: one layer norm whose output attention and a plain MLP both get, biases everywhere."""

from __future__ import annotations

import re
from dataclasses import replace

from layers.config_fields import Fields
from layers.decoder_config import Biases, Defaults, read_decoder, read_depth, read_heads, read_length
from layers.errors import ModelConfigError
from layers.family import Family
from layers.model_config import MLPKind, ModelConfig, NormKind, Residual
from layers.rope_config import read_rope
from layers.weight_rules import decoder_weight_map
from layers.weights import WeightMap

DEFAULTS = Defaults(
    rms_norm_eps=1e-5, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, hidden_act="gelu_new"
)
DEFAULT_ROTATED = 0.5
MODULES = (
    (re.compile(r"\.self_attn\.dense\."), ".self_attn.o_proj.", ""),
    (re.compile(r"^model\.final_layernorm\."), "model.norm.", ""),
)


def read_config(fields: Fields) -> ModelConfig:
    """The biases are the family's, that of the head too. Norms of queries and keys and a tied head are refused."""
    for key in ("qk_layernorm", "tie_word_embeddings"):
        if fields.flag(key, default=False):
            raise ModelConfigError(f"{fields.where}: {key} = true is not supported for this family")
    fields = fields.renamed({"rms_norm_eps": "layer_norm_eps"})
    heads = read_heads(fields)
    rope = read_rope(
        fields,
        head_dim=heads.head_dim,
        max_position_embeddings=read_length(fields, DEFAULTS),
        partial_default=DEFAULT_ROTATED,
    )
    return replace(
        read_decoder(
            fields,
            model_type=FAMILY.model_type,
            architecture=FAMILY.architectures[0],
            heads=heads,
            rope=rope,
            defaults=DEFAULTS,
            biases=Biases(qkv=True, o=True, mlp=True),
            windows=(None,) * read_depth(fields),
        ),
        norm=NormKind.LAYER,
        norm_bias=True,
        residual=Residual.PARALLEL,
        mlp=MLPKind.PLAIN,
        head_bias=True,
    )


def weight_map(config: ModelConfig) -> WeightMap:
    """`dense` is the output projection, `final_layernorm` the last norm."""
    usual = decoder_weight_map(config)
    return replace(usual, renames=(*usual.renames, *MODULES))


FAMILY = Family("phi", ("PhiForCausalLM",), read_config, weight_map)

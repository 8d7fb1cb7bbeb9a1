"""StableLM: layer norms, a quarter of each head rotated, and by choice one residual for attention and MLP."""

from __future__ import annotations

import re
from dataclasses import replace

from layers.config_fields import Fields
from layers.decoder_config import Biases, Defaults, read_decoder, read_depth, read_heads, read_length
from layers.family import Family
from layers.model_config import HeadNorm, ModelConfig, NormKind, Residual
from layers.rope_config import read_rope
from layers.weight_rules import decoder_weight_map
from layers.weights import Stacked, WeightMap

DEFAULTS = Defaults(rms_norm_eps=1e-5, max_position_embeddings=4096, bos_token_id=0, eos_token_id=0)
DEFAULT_KV_HEADS = 32
DEFAULT_ROTATED = 0.25
HEAD_NORMS = (re.compile(r"\.self_attn\.([qk])_layernorm\.norms\.(\d+)\."), r".self_attn.\1_norm_\2.", "")


def read_config(fields: Fields) -> ModelConfig:
    """`use_qkv_bias`, `qk_layernorm` and `use_parallel_residual` are off unless they are switched on."""
    fields = fields.renamed({"rms_norm_eps": "layer_norm_eps"})
    heads = read_heads(fields, kv_default=DEFAULT_KV_HEADS)
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
            biases=Biases(qkv=fields.flag("use_qkv_bias", default=False)),
            windows=(None,) * read_depth(fields),
            qk_norm=fields.flag("qk_layernorm", default=False),
        ),
        norm=NormKind.LAYER,
        norm_bias=True,
        qk_norm_over=HeadNorm.LISTED,
        residual=Residual.PARALLEL if fields.flag("use_parallel_residual", default=False) else Residual.PRE,
    )


def weight_map(config: ModelConfig) -> WeightMap:
    """Each head's norm is a tensor of its own, and a part of one parameter here."""
    usual = decoder_weight_map(config)
    heads = [("q", head) for head in range(config.num_heads)] + [("k", head) for head in range(config.num_kv_heads)]
    norms = tuple(Stacked(f"{which}_norm_{head}", f"{which}_norm", head, head + 1) for which, head in heads)
    return replace(
        usual, renames=(*usual.renames, HEAD_NORMS), stacked=(*usual.stacked, *(norms if config.qk_norm else ()))
    )


FAMILY = Family("stablelm", ("StableLmForCausalLM",), read_config, weight_map)

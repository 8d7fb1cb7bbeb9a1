"""GLM-4-0414: GLM's form with a second norm behind attention and behind the MLP."""

from __future__ import annotations

import re
from dataclasses import replace

from layers.config_fields import Fields
from layers.family import Family
from layers.model_config import ModelConfig, Residual
from layers.models.glm import read_glm
from layers.weight_rules import decoder_weight_map
from layers.weights import WeightMap

# What others call the norm behind attention stands before the MLP here. The order matters: the first frees the name.
NORMS = (
    (re.compile(r"\.post_attention_layernorm\."), ".pre_feedforward_layernorm.", ""),
    (re.compile(r"\.post_self_attn_layernorm\."), ".post_attention_layernorm.", ""),
    (re.compile(r"\.post_mlp_layernorm\."), ".post_feedforward_layernorm.", ""),
)


def read_config(fields: Fields) -> ModelConfig:
    """GLM's keys mean the same here."""
    return replace(read_glm(fields, FAMILY), residual=Residual.SANDWICH)


def weight_map(config: ModelConfig) -> WeightMap:
    """The norms by the names that other models give to their places."""
    usual = decoder_weight_map(config)
    return replace(usual, renames=(*usual.renames, *NORMS))


FAMILY = Family("glm4", ("Glm4ForCausalLM",), read_config, weight_map)

"""Granite 3: Llama's form with a scale on the embeddings, on what each part adds, on the scores and on the logits."""

from __future__ import annotations

from dataclasses import replace

from layers.config_fields import Fields
from layers.family import Family
from layers.model_config import ModelConfig
from layers.models import llama
from layers.weight_rules import decoder_weight_map


def read_config(fields: Fields) -> ModelConfig:
    """Each scale is 1 where it is absent, that of the scores too. `logits_scaling` divides."""
    return replace(
        llama.read_config(fields),
        model_type=FAMILY.model_type,
        architecture=FAMILY.architectures[0],
        embed_scale=fields.number("embedding_multiplier", default=1.0),
        residual_scale=fields.number("residual_multiplier", default=1.0),
        attention_scale=fields.number("attention_multiplier", default=1.0),
        logit_scale=1.0 / fields.number("logits_scaling", default=1.0),
    )


FAMILY = Family("granite", ("GraniteForCausalLM",), read_config, decoder_weight_map)

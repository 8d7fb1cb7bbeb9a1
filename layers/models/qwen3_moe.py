"""Qwen 3 with experts: its dense layers are Qwen 3's; the router's scores may be made to add up to one."""

from __future__ import annotations

from dataclasses import replace

from layers.config_fields import Fields
from layers.family import Family
from layers.model_config import ModelConfig
from layers.models import qwen3
from layers.moe_config import qwen_sparse_layers, read_moe
from layers.weight_rules import expert_weight_map


def read_config(fields: Fields) -> ModelConfig:
    """Dense where `mlp_only_layers` names a layer, and between each `decoder_sparse_step`-th."""
    heads = fields.positive_int("num_attention_heads")
    absent = {"num_key_value_heads": 4, "head_dim": fields.positive_int("hidden_size") // heads}
    moe = read_moe(
        fields,
        experts=128,
        top_k=8,
        intermediate_size=fields.positive_int("moe_intermediate_size", default=768),
        renormalize=fields.flag("norm_topk_prob", default=False),
        sparse=qwen_sparse_layers(fields),
    )
    dense = qwen3.read_config(fields.completed(absent))
    return replace(dense, model_type=FAMILY.model_type, architecture=FAMILY.architectures[0], moe=moe)


FAMILY = Family("qwen3_moe", ("Qwen3MoeForCausalLM",), read_config, expert_weight_map)

"""Qwen 2 with experts: besides the chosen ones, a shared expert that every token passes, behind a gate of its own."""

from __future__ import annotations

from dataclasses import replace

from layers.config_fields import Fields
from layers.family import Family
from layers.model_config import ModelConfig
from layers.models import qwen2
from layers.moe_config import qwen_sparse_layers, read_moe
from layers.weight_rules import expert_weight_map


def read_config(fields: Fields) -> ModelConfig:
    """The biases of q, k and v can be switched off (`qkv_bias`)."""
    moe = read_moe(
        fields,
        experts=60,
        top_k=4,
        intermediate_size=fields.positive_int("moe_intermediate_size", default=1408),
        renormalize=fields.flag("norm_topk_prob", default=False),
        shared_intermediate_size=fields.positive_int("shared_expert_intermediate_size", default=5632),
        shared_gate=True,
        sparse=qwen_sparse_layers(fields),
    )
    return replace(
        qwen2.read_config(fields.completed({"num_key_value_heads": 16}).changed(_window(fields))),
        model_type=FAMILY.model_type,
        architecture=FAMILY.architectures[0],
        qkv_bias=fields.flag("qkv_bias", default=True),
        moe=moe,
    )


def _window(fields: Fields) -> dict[str, None]:
    """A window that is switched off is written as 0 by some."""
    return {"sliding_window": None} if fields.raw.get("sliding_window") == 0 else {}


FAMILY = Family("qwen2_moe", ("Qwen2MoeForCausalLM",), read_config, expert_weight_map)

"""Mixtral: Mistral with experts in every layer, called w1 (gate), w2 (down) and w3 (up)."""

from __future__ import annotations

from dataclasses import replace

from layers.config_fields import Fields
from layers.family import Family
from layers.fused_experts import ExpertRule
from layers.model_config import ModelConfig
from layers.models import mistral
from layers.moe_config import read_moe
from layers.weight_rules import expert_weight_map
from layers.weights import Rename, WeightMap

EXPERTS = (
    ExpertRule("w1", "gate_up_proj", 0, 1, 2),
    ExpertRule("w3", "gate_up_proj", 1, 2, 2),
    ExpertRule("w2", "down_proj", 0, 1, 1),
)
ABSENT = {"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}  # where Mistral's are others


def read_config(fields: Fields) -> ModelConfig:
    """The chosen experts' scores always add up to one; `intermediate_size` is the experts'."""
    dense = mistral.read_config(fields.completed(ABSENT))
    moe = read_moe(fields, experts=8, top_k=2, intermediate_size=dense.intermediate_size, renormalize=True)
    return replace(dense, model_type=FAMILY.model_type, architecture=FAMILY.architectures[0], moe=moe)


def weight_map(config: ModelConfig) -> WeightMap:
    """The sparse part of a layer is called `block_sparse_moe`, or `mlp`."""
    shared = expert_weight_map(config)
    return replace(
        shared,
        substrings=(*shared.substrings, Rename(".block_sparse_moe.", ".mlp.")),
        experts=(*EXPERTS, *shared.experts),
    )


FAMILY = Family("mixtral", ("MixtralForCausalLM",), read_config, weight_map)

"""The naming rules that checkpoints of all decoder families share: what is fused here, and what is never used."""

from __future__ import annotations

import re
from dataclasses import replace

from layers.fused_experts import GATE_UP_DOWN
from layers.model_config import ModelConfig
from layers.weights import RegexRule, Stacked, WeightMap

# A checkpoint may hold the parts one by one or already fused, whatever the family usually does.
GATE_UP = (
    Stacked("gate_proj", "gate_up_proj", 0, 1),
    Stacked("up_proj", "gate_up_proj", 1, 2),
    Stacked("gate_up_proj", "gate_up_proj", 0, 2),
)
FUSED = (
    Stacked("q_proj", "qkv_proj", 0, 1),
    Stacked("k_proj", "qkv_proj", 1, 2),
    Stacked("v_proj", "qkv_proj", 2, 3),
    Stacked("qkv_proj", "qkv_proj", 0, 3),
    *GATE_UP,
)

# Tied to the beginning, which a search that fails leaves at once: large models ask for a hundred thousand names.
UNUSED: tuple[RegexRule, ...] = (
    (
        re.compile(r"^(?:.*\.)?(?:rotary(?:_pos)?_emb\.(?:original_)?inv_freq|cos_cached|sin_cached)$"),
        None,
        "a rotary table, which the configuration determines",
    ),
    (
        re.compile(r"^(?:.*\.)?(?:masked_bias|(?:attn|attention|self_attn)\.bias)$"),
        None,
        "a causal mask, which the attention makes itself",
    ),
    (re.compile(r"^(?:.*[._])?positions?_ids$"), None, "a table of positions, which the runtime counts itself"),
)


def decoder_weight_map(config: ModelConfig) -> WeightMap:
    """The map of a decoder whose modules bear Hugging Face's names."""
    return WeightMap(renames=UNUSED, stacked=FUSED, num_layers=config.num_layers)


def expert_weight_map(config: ModelConfig) -> WeightMap:
    """The same with experts of Hugging Face's names, one by one or all in one tensor."""
    return replace(decoder_weight_map(config), experts=GATE_UP_DOWN)

"""DeepSeek-V2: latent attention; experts scored by a softmax, chosen within the best groups or among all."""

from __future__ import annotations

from layers.config_fields import Fields
from layers.decoder_config import Defaults
from layers.family import Family
from layers.mla_config import check_choice, latent_weight_map, read_grouped_moe, read_groups, read_latent_decoder
from layers.model_config import GroupedChoice, ModelConfig

DEFAULTS = Defaults(rms_norm_eps=1e-6, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2)
PUBLISHED_TOP_K = 6  # of V2 and V2-Lite; transformers has no default


def read_config(fields: Fields) -> ModelConfig:
    """A group's rank is its best expert's. Weights that are made to add up to one are scaled after that."""
    check_choice(fields, "scoring_func", known=("softmax",), default="softmax")
    method = check_choice(fields, "topk_method", known=("greedy", "group_limited_greedy"), default="greedy")
    groups, best = read_groups(fields, groups=1, top_groups=1) if method != "greedy" else (1, 1)
    scale = fields.number("routed_scaling_factor", default=1.0)
    choice = GroupedChoice(sigmoid=False, groups=groups, top_groups=best, scale=scale)
    moe = read_grouped_moe(
        fields, choice, experts=64, top_k=PUBLISHED_TOP_K, intermediate_size=1407, shared=2, dense=0, renormalize=False
    )
    return read_latent_decoder(fields, FAMILY, defaults=DEFAULTS, moe=moe)


FAMILY = Family("deepseek_v2", ("DeepseekV2ForCausalLM",), read_config, latent_weight_map)

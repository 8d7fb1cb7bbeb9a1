"""DeepSeek-V3 and R1: latent attention; experts scored by sigmoids, which a bias corrects when they are chosen."""

from __future__ import annotations

from layers.config_fields import Fields
from layers.decoder_config import Defaults
from layers.family import Family
from layers.mla_config import check_choice, latent_weight_map, read_grouped_moe, read_groups, read_latent_decoder
from layers.model_config import GroupedChoice, ModelConfig

DEFAULTS = Defaults(rms_norm_eps=1e-6, max_position_embeddings=4096, bos_token_id=0, eos_token_id=1)


def read_config(fields: Fields) -> ModelConfig:
    """A group's rank is the sum of its two best experts'. Layers that predict further tokens are not run."""
    check_choice(fields, "scoring_func", known=("sigmoid",), default="sigmoid")
    check_choice(fields, "topk_method", known=("noaux_tc",), default="noaux_tc")
    groups, best = read_groups(fields, groups=8, top_groups=4)
    scale = fields.number("routed_scaling_factor", default=2.5)
    choice = GroupedChoice(sigmoid=True, groups=groups, top_groups=best, summed=2, correction_bias=True, scale=scale)
    moe = read_grouped_moe(
        fields, choice, experts=256, top_k=8, intermediate_size=2048, shared=1, dense=3, renormalize=True
    )
    return read_latent_decoder(fields, FAMILY, defaults=DEFAULTS, moe=moe)


FAMILY = Family("deepseek_v3", ("DeepseekV3ForCausalLM",), read_config, latent_weight_map)

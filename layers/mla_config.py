"""Reading the keys that DeepSeek's families share: latent attention, groups of experts. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from layers.config_fields import Fields
from layers.decoder_config import Biases, Defaults, Heads, read_decoder, read_depth, read_length
from layers.errors import ModelConfigError
from layers.family import Family
from layers.model_config import GroupedChoice, MLAConfig, ModelConfig, MoEConfig
from layers.moe_config import read_moe
from layers.rope_config import read_rope, score_stretch
from layers.weight_rules import GATE_UP, expert_weight_map
from layers.weights import Rename, WeightMap

_NAMES = {"num_experts": "n_routed_experts"}
_SHARED = Rename(".shared_experts.", ".shared_expert.")


def read_latent_decoder(fields: Fields, family: Family, *, defaults: Defaults, moe: MoEConfig) -> ModelConfig:
    """A decoder of latent attention. Keys that are absent have the numbers of transformers 5, the same for V2 and V3.

    As many key/value heads as heads, whatever `num_key_value_heads` says: keys and values are made for every head.
    """
    heads = fields.positive_int("num_attention_heads")
    sizes = _read_sizes(fields)
    rotated = sizes.qk_rope_head_dim
    rope = read_rope(fields, head_dim=rotated, max_position_embeddings=read_length(fields, defaults))
    config = read_decoder(
        fields,
        model_type=family.model_type,
        architecture=family.architectures[0],
        heads=Heads(heads, heads, rotated),
        rope=replace(rope, interleaved=fields.flag("rope_interleave", default=True)),
        defaults=defaults,
        biases=_read_biases(fields),
        windows=(None,) * read_depth(fields),
    )
    scale = sizes.qk_head_dim**-0.5 * score_stretch(fields, rope)
    return replace(config, mla=sizes, moe=moe, attention_scale=scale)


def _read_sizes(fields: Fields) -> MLAConfig:
    low = fields.optional_int("q_lora_rank") if fields.has("q_lora_rank") else 1536
    sizes = MLAConfig(
        q_lora_rank=low,
        kv_lora_rank=fields.positive_int("kv_lora_rank", default=512),
        qk_nope_head_dim=fields.positive_int("qk_nope_head_dim", default=128),
        qk_rope_head_dim=fields.positive_int("qk_rope_head_dim", default=64),
        v_head_dim=fields.positive_int("v_head_dim", default=128),
    )
    if sizes.qk_rope_head_dim % 2:
        raise ModelConfigError(
            f"{fields.where}: qk_rope_head_dim ({sizes.qk_rope_head_dim}) is odd; rotation works on pairs"
        )
    return sizes


def _read_biases(fields: Fields) -> Biases:
    bias = fields.flag("attention_bias", default=False)
    return Biases(qkv=bias, o=bias, mlp=fields.flag("mlp_bias", default=False))


def read_grouped_moe(
    fields: Fields,
    choice: GroupedChoice,
    *,
    experts: int,
    top_k: int,
    intermediate_size: int,
    shared: int,
    dense: int,
    renormalize: bool,
) -> MoEConfig:
    """The sparse layers: every `moe_layer_freq`-th from `first_k_dense_replace` on. The numbers are the defaults of
    n_routed_experts, num_experts_per_tok, moe_intermediate_size, n_shared_experts, first_k_dense_replace and
    norm_topk_prob."""
    first = fields.optional_int("first_k_dense_replace", least=0) if fields.has("first_k_dense_replace") else dense
    every = fields.positive_int("moe_layer_freq", default=1)
    inner = fields.positive_int("moe_intermediate_size", default=intermediate_size)
    moe = read_moe(
        fields.renamed(_NAMES),
        experts=experts,
        top_k=top_k,
        intermediate_size=inner,
        renormalize=fields.flag("norm_topk_prob", default=renormalize),
        shared_intermediate_size=inner * _read_shared(fields, shared),
        sparse=tuple(layer >= (first or 0) and layer % every == 0 for layer in range(read_depth(fields))),
    )
    _check_groups(fields, moe, choice)
    return replace(moe, grouped=choice)


def _read_shared(fields: Fields, default: int) -> int:
    """How many shared experts; null means none."""
    return (fields.optional_int("n_shared_experts", least=0) or 0) if fields.has("n_shared_experts") else default


def read_groups(fields: Fields, *, groups: int, top_groups: int) -> tuple[int, int]:
    """n_group and topk_group. A null n_group is one group, a null topk_group all of them; absent ones as given."""
    found = (fields.optional_int("n_group") or 1) if fields.has("n_group") else groups
    best = (fields.optional_int("topk_group") or found) if fields.has("topk_group") else min(top_groups, found)
    return found, best


def _check_groups(fields: Fields, moe: MoEConfig, choice: GroupedChoice) -> None:
    if choice.groups == 1:
        return
    size, over = divmod(moe.num_experts, choice.groups)
    problem = ""
    if over:
        problem = f"n_routed_experts ({moe.num_experts}) is not a multiple of n_group ({choice.groups})"
    elif choice.top_groups > choice.groups:
        problem = f"topk_group ({choice.top_groups}) is more than n_group ({choice.groups})"
    elif size < choice.summed:
        problem = f"n_group {choice.groups} leaves {size} expert in a group; {choice.summed} are ranked by"
    elif moe.top_k > size * choice.top_groups:
        within = size * choice.top_groups
        problem = f"num_experts_per_tok ({moe.top_k}) is more than the {within} experts of topk_group groups"
    if problem:
        raise ModelConfigError(f"{fields.where}: {problem}")


def check_choice(fields: Fields, key: str, *, known: tuple[str, ...], default: str) -> str:
    """The value of a key that names a way to choose experts. Raises ModelConfigError for one that is not `known`."""
    found = fields.text(key, default=default)
    if found not in known:
        raise ModelConfigError(f"{fields.where}: {key} {found!r} is not known for this model; {' or '.join(known)} is")
    return found


def latent_weight_map(config: ModelConfig) -> WeightMap:
    """Experts of Hugging Face's names; projections of queries, keys and values as they are."""
    shared = expert_weight_map(config)
    return replace(shared, substrings=(*shared.substrings, _SHARED), stacked=GATE_UP)

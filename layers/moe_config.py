"""Reading the keys of sparse layers that families share. Imports no torch."""

from __future__ import annotations

from layers.config_fields import Fields
from layers.decoder_config import read_depth
from layers.errors import ModelConfigError
from layers.model_config import MoEConfig

MOST_EXPERTS = 65_536


def read_moe(
    fields: Fields,
    *,
    experts: int,
    top_k: int,
    intermediate_size: int,
    renormalize: bool,
    shared_intermediate_size: int = 0,
    shared_gate: bool = False,
    sparse: tuple[bool, ...] | None = None,
) -> MoEConfig:
    """The sparse layers; all of them where `sparse` is None. The numbers are the family's defaults.

    `num_experts` is called `num_local_experts` as well. Raises ModelConfigError.
    """
    key = "num_local_experts" if fields.has("num_local_experts") and not fields.has("num_experts") else "num_experts"
    count = fields.positive_int(key, default=experts, largest=MOST_EXPERTS)
    chosen = fields.positive_int("num_experts_per_tok", default=top_k)
    if chosen > count:
        name = fields.called.get(key, key)
        raise ModelConfigError(f"{fields.where}: num_experts_per_tok ({chosen}) is more than {name} ({count})")
    return MoEConfig(
        num_experts=count,
        top_k=chosen,
        intermediate_size=intermediate_size,
        sparse=(True,) * read_depth(fields) if sparse is None else sparse,
        renormalize=renormalize,
        shared_intermediate_size=shared_intermediate_size,
        shared_gate=shared_gate,
    )


def qwen_sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer, without those of `mlp_only_layers`."""
    step = fields.positive_int("decoder_sparse_step", default=1)
    dense = fields.int_list("mlp_only_layers") or ()
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(read_depth(fields)))

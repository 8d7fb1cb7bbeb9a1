"""The configuration as one of several ranks has it: its heads, the layers of its stage. Pure; imports no torch."""

from __future__ import annotations

from dataclasses import replace

from layers.errors import ShardError
from layers.model_config import ModelConfig
from layers.topology import Topology


def local_config(config: ModelConfig, topology: Topology) -> ModelConfig:
    """The configuration with the heads and the layers that a rank has: what its caches are sized by."""
    if topology.tensor == topology.pipeline == 1:
        return config
    check_heads(config, topology)
    heads, kv_heads = config.num_heads // topology.tensor, max(1, config.num_kv_heads // topology.tensor)
    first, stop = topology.layers_of_stage(config.num_layers)
    return replace(config, num_heads=heads, num_kv_heads=kv_heads, num_layers=stop - first)


def check_heads(config: ModelConfig, topology: Topology) -> None:
    """Raises ShardError where heads cannot be shared out."""
    ranks, heads, kv_heads = topology.tensor, config.num_heads, config.num_kv_heads
    if heads % ranks:
        raise ShardError(f"tensor parallel size {ranks} does not divide the model's {heads} attention heads")
    if config.mla is None and kv_heads % ranks and ranks % kv_heads:
        raise ShardError(
            f"tensor parallel size {ranks} and the model's {kv_heads} key/value heads: neither divides the other"
        )

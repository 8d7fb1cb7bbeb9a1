"""Activations in 8 bits where ranks have parts of each token: codes and results are those of one rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from layers.architecture import layer_specs
from layers.batch import make_batch
from layers.model_config import ModelConfig
from layers.parallel import Groups
from layers.rank_config import local_config
from layers.topology import Topology
from quant.activations import quantize_tokens
from quant.dtypes import DType
from quant.registry import scheme_by_name
from tests.layers.thread_groups import on_ranks, rank_model, whole_stored
from tests.layers.tiny import OneScheme, config_of, context, new_cache, random_weights, some_ids

PROMPT = some_ids(9)
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}


def logits_on(config: ModelConfig, topology: Topology, scheme: str) -> list[torch.Tensor]:
    """float32 logits of each rank, every linear layer with activations in 8 bits."""
    specs = layer_specs(config, dtype=DType.F32, policy=OneScheme(scheme_by_name(scheme)))
    kept = whole_stored(specs, random_weights(config))

    def work(at: Topology, groups: Groups) -> torch.Tensor:
        model = rank_model(config, specs, kept, at)
        cache = new_cache(local_config(config, at), max_tokens=len(PROMPT))
        batch = make_batch([(PROMPT, cache)], vocab_size=config.vocab_size)
        logits: torch.Tensor = model(batch, replace(context(), groups=groups, int8_activations=True))
        return logits

    return on_ranks(topology, work)


@pytest.mark.parametrize("ranks", [2, 4])
def test_codes_of_a_part_of_a_token_are_the_parts_of_its_codes(ranks: int) -> None:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)) * torch.tensor(
        [[1.0], [30.0], [0.0], [1e-3], [1]]
    )
    codes, scale = quantize_tokens(x)

    def part(at: Topology, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize_tokens(x.chunk(ranks, 1)[at.tensor_rank], maximum=groups.tensor.maximum)

    found = on_ranks(Topology(tensor=ranks), part)
    assert torch.equal(torch.cat([one for one, _ in found], 1), codes)
    assert all(torch.equal(one, scale) for _, one in found)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("scheme", ["none", "int4_per_group", "int8_per_channel"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_logits_of_many_ranks_are_those_of_one(model_type: str, scheme: str, ranks: int) -> None:
    """But for the order of float32 sums: with scales of their own ranks are off by 0.03 and more."""
    config = config_of(model_type, **({"tie_word_embeddings": True} if model_type == "gpt2" else {}), **HEADS)
    (alone,) = logits_on(config, Topology(), scheme)
    assert alone.std() > 0.01
    for logits in logits_on(config, Topology(tensor=ranks), scheme):
        torch.testing.assert_close(logits, alone, rtol=0, atol=5e-3)

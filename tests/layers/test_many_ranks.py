"""Layers that several ranks share give what they give on one: dense layers and experts cut over ranks, experts whole on
ranks of their own, and both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from layers.architecture import layer_specs
from layers.batch import make_batch
from layers.cuts import cut_specs
from layers.decoder import build_shell, stored_names
from layers.model_config import ModelConfig
from layers.parallel import Groups, StandInGroup
from layers.rank_config import local_config
from layers.topology import Topology
from layers.weights import LayerSpec
from quant.dtypes import DType
from quant.registry import scheme_by_name, scheme_names
from quant.scheme import Scheme
from quant.wide import Wide
from tests.layers.family_cases import FAMILY_CASES
from tests.layers.thread_groups import on_ranks, rank_model, whole_stored
from tests.layers.tiny import OneScheme, config_of, context, new_cache, random_weights, run, some_ids, wide_specs

SPARSE = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3"]
QUICK = ("fp8_per_block", "int4_per_group")  # schemes of both dims in blocks, and of two numbers a byte
PROMPTS = (some_ids(9), some_ids(4, seed=1))
EIGHT_HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}


def case(name: str, **changes: Any) -> ModelConfig:
    model_type, own = FAMILY_CASES.get(name, (name, {}))
    return config_of(model_type, **{**own, **changes})


def kept_of(
    config: ModelConfig, scheme: Scheme | None = None
) -> tuple[tuple[LayerSpec, ...], dict[str, dict[str, torch.Tensor]]]:
    """The uncut parameters, and what is kept of them."""
    policy = OneScheme(scheme or Wide(), head=scheme is not None)
    specs = layer_specs(config, dtype=DType.F32, policy=policy)
    return specs, whole_stored(specs, random_weights(config))


def logits_on_one(
    config: ModelConfig, prompts: Sequence[Sequence[int]] = PROMPTS, *, scheme: Scheme | None = None
) -> torch.Tensor:
    return run(rank_model(config, *kept_of(config, scheme), Topology()), *prompts)


def logits_on_ranks(
    config: ModelConfig,
    topology: Topology,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    *,
    scheme: Scheme | None = None,
) -> list[torch.Tensor]:
    """Of each rank: the logits of its replica's prompts, which is prompt i for replica i mod replicas."""
    specs, kept = kept_of(config, scheme)

    def work(topology: Topology, groups: Groups) -> torch.Tensor:
        model = rank_model(config, specs, kept, topology)
        own = prompts[topology.replica :: topology.replicas]
        local = local_config(config, topology)
        caches = [new_cache(local, max_tokens=len(prompt)) for prompt in own]
        batch = make_batch(list(zip(own, caches, strict=True)), vocab_size=config.vocab_size)
        logits: torch.Tensor = model(batch, replace(context(), groups=groups))
        return logits

    return on_ranks(topology, work)


def check(
    config: ModelConfig,
    topology: Topology,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    *,
    scheme: Scheme | None = None,
) -> None:
    wanted = logits_on_one(config, prompts, scheme=scheme).split([len(prompt) for prompt in prompts])
    for rank, found in enumerate(logits_on_ranks(config, topology, prompts, scheme=scheme)):
        own = wanted[topology.at(rank).replica :: topology.replicas]
        expected = torch.cat(own) if own else torch.empty(0, config.vocab_size)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == model_type or "norms, bias" in name else [pytest.mark.slow])
        for name, (model_type, _) in {"llama": ("llama", {}), "qwen2": ("qwen2", {}), **FAMILY_CASES}.items()
    ],
)
def test_every_family_cut_over_ranks_gives_the_same_logits(name: str, ranks: int) -> None:
    check(case(name), Topology(tensor=ranks))


@pytest.mark.parametrize("model_type", ["llama", "olmo2", "olmoe", "gpt_oss"])
def test_eight_ranks_share_two_key_heads(model_type: str) -> None:
    check(case(model_type, **EIGHT_HEADS), Topology(tensor=8))


@pytest.mark.parametrize(
    ("tensor", "expert"),
    [(2, 4), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 2), (1, 4), (2, 2), (4, 4)))],
)
@pytest.mark.parametrize("name", SPARSE)
def test_experts_on_ranks_of_their_own_give_the_same_logits(name: str, tensor: int, expert: int) -> None:
    check(case(name), Topology(tensor=tensor, expert=expert))


@pytest.mark.parametrize(
    "topology",
    [
        Topology(expert=2, placement="round_robin"),
        Topology(tensor=2, expert=4, placement="round_robin"),
        Topology(expert=3, expert_map=((0, 1, 2, 3, 4, 5, 6), (6, 2), (4,))),
        Topology(tensor=2, expert=4, expert_map=((5, 0, 1), (0, 2, 3), (3, 4, 0), (6, 5))),
    ],
    ids=["round robin", "round robin on two replicas", "one rank has all", "redundant on two replicas"],
)
def test_wherever_the_experts_are_the_logits_are_the_same(topology: Topology) -> None:
    check(case("qwen3_moe"), topology)


@pytest.mark.parametrize("topology", [Topology(tensor=4), Topology(expert=2), Topology(tensor=2, expert=4)], ids=str)
@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_tokens_that_follow_one_by_one_are_the_same_as_the_whole_prompt(name: str, topology: Topology) -> None:
    config = case(name)
    (specs, kept), ids = kept_of(config), some_ids(7)

    def work(topology: Topology, groups: Groups) -> torch.Tensor:
        model, cache = (
            rank_model(config, specs, kept, topology),
            new_cache(local_config(config, topology), max_tokens=7),
        )
        ctx, steps = replace(context(), groups=groups), [ids[:4], ids[4:5], ids[5:6], ids[6:]]
        batches = [[(step, cache)] if topology.replica == 0 else [] for step in steps]
        return torch.cat([model(make_batch(one, vocab_size=config.vocab_size), ctx) for one in batches])

    found = on_ranks(topology, work)
    torch.testing.assert_close(found[0], logits_on_one(config, [ids]), rtol=1e-5, atol=1e-5)
    assert all(one.shape[0] in (0, 7) for one in found)


def test_a_replica_without_tokens_makes_no_keys_and_no_logits() -> None:
    config = case("olmoe")
    first, second = logits_on_ranks(config, Topology(expert=2), prompts=[some_ids(5)])
    assert first.shape == (5, config.vocab_size)
    assert second.shape == (0, config.vocab_size)


def test_logits_of_no_rows_need_no_other_rank() -> None:
    config = case("llama")

    def work(topology: Topology, groups: Groups) -> torch.Tensor:
        model = rank_model(config, *kept_of(config), topology)
        return model.head(torch.zeros(0, config.hidden_size), replace(context(), groups=groups))

    assert [found.shape for found in on_ranks(Topology(tensor=2), work)] == [(0, config.vocab_size)] * 2


@pytest.mark.parametrize("tied", [True, False])
def test_a_rank_without_rows_of_the_vocabulary_has_all_logits_nevertheless(tied: bool) -> None:
    config = case("llama", vocab_size=50, tie_word_embeddings=tied)

    def rows(topology: Topology, groups: Groups) -> torch.Tensor:
        model = rank_model(config, *kept_of(config), topology)
        return model.local_logits(torch.ones(3, config.hidden_size), replace(context(), groups=groups))

    assert [found.shape for found in on_ranks(Topology(tensor=2), rows)] == [(3, 50), (3, 0)]
    check(config, Topology(tensor=2), prompts=[some_ids(5, vocab_size=50)])


def test_of_a_pipeline_each_stage_has_its_own_layers_under_their_own_names() -> None:
    config = case("llama", num_hidden_layers=3, tie_word_embeddings=True)
    topology = Topology(pipeline=2, rank=1)
    own = cut_specs(wide_specs(config), config, topology)
    model = build_shell(config, own, topology=topology)
    named = {name for spec in own for param in spec.params for name in stored_names(param)}
    assert {name for name, _ in model.named_parameters()} == named
    assert "model.layers.2.mlp.down_proj.weight" in named
    assert model.dtype is torch.float32
    with pytest.raises(RuntimeError, match="another stage of the pipeline"):
        model.layers[0](torch.zeros(1, 48))


def test_the_stages_of_a_pipeline_one_after_the_other_are_the_whole_model() -> None:
    config, ids = case("gemma2", tie_word_embeddings=True), some_ids(8)
    specs, kept = kept_of(config)
    cache = new_cache(config, max_tokens=8)
    with torch.inference_mode():
        batch = make_batch([(ids, cache)], vocab_size=config.vocab_size)
        stages = [rank_model(config, specs, kept, Topology(pipeline=3, rank=rank)) for rank in range(3)]
        hidden = stages[0].embed(batch.token_ids, context())
        for index, model in enumerate(stages):
            hidden = model.layers[index](hidden, batch, model.rope(batch), context())
        assert torch.equal(stages[2].head(hidden, context()), logits_on_one(config, [ids]))


@pytest.mark.parametrize(
    "name",
    [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in scheme_names() if name not in (*QUICK, "none"))],
)
def test_quantized_parts_give_the_logits_of_the_quantized_whole(name: str) -> None:
    check(
        case("qwen2_moe", vocab_size=60), Topology(tensor=2), [some_ids(5, vocab_size=60)], scheme=scheme_by_name(name)
    )
    check(case("deepseek_v3"), Topology(tensor=2, expert=4), scheme=scheme_by_name(name))


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3"])
def test_one_rank_can_be_run_without_the_others(name: str) -> None:
    config, ids = case(name), some_ids(6)
    topology = Topology(tensor=2, expert=4, rank=3)
    model = rank_model(config, *kept_of(config), topology)
    groups = Groups(StandInGroup(2, topology.tensor_rank), StandInGroup(4, topology.expert_rank))
    caches = [new_cache(local_config(config, topology), max_tokens=6)]
    logits = run(model, ids, caches=caches, ctx=replace(context(), groups=groups))
    assert logits.shape == (6, config.vocab_size)
    assert logits[:, 64:].isfinite().all()

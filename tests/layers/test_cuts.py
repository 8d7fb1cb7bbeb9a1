"""A rank's part of each parameter: rows by heads, columns, vocabulary, experts, layers; and what cannot be cut."""

from __future__ import annotations

from typing import Any

import pytest

from layers.architecture import layer_specs
from layers.cuts import cut_specs, vocabulary_rows
from layers.errors import ShardError
from layers.rank_config import local_config
from layers.topology import Topology
from layers.weights import LayerSpec, ParamSpec, Part
from quant.dtypes import DType
from quant.float8 import Fp8PerBlock
from quant.int4 import IntPerGroup
from quant.microscaling import MxFp4
from quant.scheme import Scheme
from tests.layers.tiny import ALL_WIDE, OneScheme, config_of

ATTENTION = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"


def cut(
    topology: Topology, model_type: str = "llama", *, scheme: Scheme | None = None, tied: bool = False, **changes: Any
) -> dict[str, ParamSpec]:
    return {
        param.name: param
        for spec in layers_of(topology, model_type, scheme, tied=tied, **changes)
        for param in spec.params
    }


def layers_of(
    topology: Topology, model_type: str, scheme: Scheme | None, *, tied: bool, **changes: Any
) -> tuple[LayerSpec, ...]:
    config = config_of(model_type, **changes)
    policy = ALL_WIDE if scheme is None else OneScheme(scheme)
    return cut_specs(layer_specs(config, dtype=DType.F32, policy=policy, tied=tied), config, topology)


def test_each_section_is_cut_by_itself() -> None:
    params = cut(Topology(2, rank=1), head_dim=12)
    assert params[f"{ATTENTION}.qkv_proj.weight"].parts == (Part(0, 24, 48), Part(1, 12, 24), Part(2, 12, 24))
    assert params[f"{ATTENTION}.qkv_proj.weight"].shape == (48, 48)
    assert params[f"{MLP}.gate_up_proj.weight"].parts == (Part(0, 40, 80), Part(1, 40, 80))
    down = params[f"{MLP}.down_proj.weight"]
    assert (down.shape, down.cut.columns if down.cut else None) == ((48, 40), (40, 80))
    assert params["model.norm.weight"].cut is None


def test_a_key_head_is_on_several_ranks_where_there_are_fewer_than_ranks() -> None:
    parts = [cut(Topology(4, rank=rank), head_dim=12)[f"{ATTENTION}.qkv_proj.weight"].parts[1] for rank in range(4)]
    assert parts == [Part(1, 0, 12), Part(1, 0, 12), Part(1, 12, 24), Part(1, 12, 24)]
    config = local_config(config_of(), Topology(4))
    assert (config.num_heads, config.num_kv_heads) == (1, 1)


def test_the_vocabulary_is_cut_in_multiples_of_64_and_the_last_rank_may_have_nothing() -> None:
    tables = [cut(Topology(4, rank=rank), vocab_size=150)["lm_head.weight"] for rank in range(4)]
    assert [table.parts[0] for table in tables] == [
        Part(0, 0, 64),
        Part(0, 64, 128),
        Part(0, 128, 150),
        Part(0, 150, 150),
    ]
    assert [table.shape for table in tables] == [(64, 48), (64, 48), (22, 48), (0, 48)]
    assert vocabulary_rows(150, 4) == 64
    assert vocabulary_rows(151_936, 8) == 19_008


def test_what_is_added_to_a_sum_is_on_the_first_rank_alone() -> None:
    here, there = (cut(Topology(2, rank=rank), "gpt2") for rank in range(2))
    assert f"{ATTENTION}.o_proj.bias" in here
    assert f"{ATTENTION}.o_proj.bias" not in there
    assert there[f"{ATTENTION}.qkv_proj.bias"].parts == (Part(0, 24, 48), Part(1, 24, 48), Part(2, 24, 48))
    assert there[f"{MLP}.fc1.bias"].shape[0] * 2 == here[f"{MLP}.fc1.bias"].whole.shape[0]


MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 12}


def test_an_expert_rank_has_whole_experts() -> None:
    params = cut(Topology(expert=4, rank=1), "qwen3_moe", **MOE)
    gate_up = params[f"{MLP}.experts.gate_up_proj.weight"]
    assert gate_up.parts == tuple(Part(section, 0, 24) for section in (4, 5, 6, 7))  # gate, up of experts 2 and 3
    assert gate_up.shape == (4 * 24, 48)
    assert not gate_up.is_cut_within
    assert params[f"{MLP}.experts.down_proj.weight"].shape == (2 * 48, 24)
    assert params[f"{MLP}.gate.weight"].shape == (6, 48)
    assert params[f"{ATTENTION}.qkv_proj.weight"].cut is None


def test_without_expert_ranks_each_expert_is_cut() -> None:
    params = cut(Topology(2, rank=1), "qwen3_moe", **MOE)
    gate_up = params[f"{MLP}.experts.gate_up_proj.weight"]
    assert gate_up.parts == tuple(Part(section, 12, 24) for section in range(12))
    assert params[f"{MLP}.experts.down_proj.weight"].shape == (6 * 48, 12)


def test_latents_are_on_every_rank_and_heads_are_shared_out() -> None:
    changes = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 10,
               "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
               "moe_intermediate_size": 24, "num_key_value_heads": 4}  # fmt: skip
    params = cut(Topology(2, rank=1), "deepseek_v3", **changes)
    assert params[f"{ATTENTION}.q_a_proj.weight"].cut is None
    assert params[f"{ATTENTION}.kv_a_proj_with_mqa.weight"].cut is None
    assert params[f"{ATTENTION}.q_b_proj.weight"].parts == (Part(0, 32, 64),)
    assert params[f"{ATTENTION}.kv_b_proj.weight"].parts == (Part(0, 44, 88),)
    mixed = params[f"{ATTENTION}.o_proj.weight"].cut
    assert mixed is not None
    assert mixed.columns == (20, 40)


def test_a_stage_has_its_own_layers_and_the_ends_theirs() -> None:
    stages = [
        layers_of(Topology(pipeline=2, rank=rank), "llama", None, tied=True, num_hidden_layers=3) for rank in range(2)
    ]
    assert [spec.name for spec in stages[0]] == ["embed", "layers.0", "layers.1"]
    assert [spec.name for spec in stages[1]] == ["layers.2", "head"]
    for stage in stages:  # the one matrix of a tied model is needed at both ends
        assert sum(param.name == "model.embed_tokens.weight" for spec in stage for param in spec.params) == 1


def test_blocks_that_a_cut_goes_through_are_kept_smaller() -> None:
    params = cut(Topology(2, rank=1), scheme=Fp8PerBlock(), intermediate_size=160)
    assert params[f"{MLP}.down_proj.weight"].scheme == Fp8PerBlock(block=(128, 16))  # 80 columns: from 80 on
    assert params[f"{MLP}.down_proj.weight"].whole.scheme == Fp8PerBlock()
    ints = cut(Topology(2, rank=1), scheme=IntPerGroup(), intermediate_size=96)
    assert ints[f"{MLP}.down_proj.weight"].scheme == IntPerGroup(group_size=16)


@pytest.mark.parametrize(
    ("ranks", "changes", "words"),
    [
        (3, {}, "tensor parallel size 3 does not divide the model's 4 attention heads"),
        (4, {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 48},
         "tensor parallel size 4 and the model's 3 key/value heads: neither divides the other"),
        (4, {"intermediate_size": 90}, "gate_up_proj.weight: its 90 outputs are not divided by tensor parallel size 4"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_out_is_refused_with_both_numbers(
    ranks: int, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ShardError, match=words):
        cut(Topology(ranks), **changes)


def test_a_cut_within_a_byte_of_two_numbers_is_refused() -> None:
    with pytest.raises(
        ShardError, match=r"down_proj\.weight: mxfp4: columns 0 to 45 of 90 are cut at 45, within a byte"
    ):
        cut(Topology(2), scheme=MxFp4(), intermediate_size=90)

"""Meshes of ranks: sizes, places, shares of layers and experts, and the sizes that make none."""

from __future__ import annotations

import pytest

from layers.errors import ShardError
from layers.topology import Topology, experts_of


@pytest.mark.parametrize(
    ("tensor", "expert", "pipeline", "world", "replicas"),
    [(1, 1, 1, 1, 1), (4, 1, 1, 4, 1), (4, 4, 1, 4, 1), (2, 8, 1, 8, 4), (1, 4, 2, 8, 4), (2, 1, 3, 6, 1)],
)
def test_a_mesh_has_as_many_ranks_as_the_larger_of_both_for_each_stage(
    tensor: int, expert: int, pipeline: int, world: int, replicas: int
) -> None:
    topology = Topology(tensor, expert, pipeline)
    assert (topology.world, topology.replicas) == (world, replicas)
    assert topology.is_single == (world == 1)


def test_dense_layers_are_shared_by_consecutive_ranks_and_experts_by_all_of_a_stage() -> None:
    places = [Topology(2, 4, 2, rank) for rank in range(8)]
    assert [at.stage for at in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [at.tensor_rank for at in places] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [at.expert_rank for at in places] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [at.replica for at in places] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert places[2].tensor_ranks == (2, 3)
    assert places[5].expert_ranks == (4, 5, 6, 7)
    assert Topology(2).expert_ranks == (0,)  # experts are cut like dense layers


def test_the_first_ranks_hold_one_expert_more() -> None:
    held = [experts_of(Topology(expert=4, rank=rank), 6) for rank in range(4)]
    assert held == [(0, 1), (2, 3), (4,), (5,)]
    turns = [experts_of(Topology(expert=4, rank=rank, placement="round_robin"), 6) for rank in range(4)]
    assert turns == [(0, 4), (1, 5), (2,), (3,)]


def test_a_map_decides_which_experts_a_rank_holds() -> None:
    topology = Topology(expert=2, rank=1, expert_map=((0, 1, 2), (2, 3, 0)))
    assert experts_of(topology, 4) == (2, 3, 0)
    assert experts_of(topology, 4, rank=0) == (0, 1, 2)


@pytest.mark.parametrize(
    ("expert_map", "words"),
    [
        (((0, 1), (2, 4)), "names expert 4; the model has 4"),
        (((0, 1), (2, 1)), "leaves out expert 3"),
        (((0, 0), (1, 2, 3)), "names an expert twice on rank 0"),
    ],
)
def test_a_map_must_name_every_expert_there_is(expert_map: tuple[tuple[int, ...], ...], words: str) -> None:
    with pytest.raises(ShardError, match=words):
        experts_of(Topology(expert=2, expert_map=expert_map), 4)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tensor": 0}, "tensor parallel size 0: at least 1"),
        ({"tensor": 4, "expert": 6}, "expert parallel size 6 is no multiple of tensor parallel size 4"),
        ({"tensor": 4, "expert": 2}, "expert parallel size 2 is no multiple of tensor parallel size 4"),
        ({"tensor": 2, "rank": 2}, "rank 2 is none of the 2 ranks"),
        ({"placement": "random"}, "expert placement 'random' is not known: linear or round_robin is"),
        ({"expert": 2, "expert_map": ((0,),)}, "the expert map has 1 ranks, not the 2 of this run"),
    ],
)
def test_sizes_that_make_no_mesh_are_refused_with_both_numbers(sizes: dict[str, object], words: str) -> None:
    with pytest.raises(ShardError, match=words):
        Topology(**sizes)  # type: ignore[arg-type]


def test_layers_are_shared_out_over_stages() -> None:
    shares = [Topology(pipeline=3, rank=rank).layers_of_stage(7) for rank in range(3)]
    assert shares == [(0, 3), (3, 5), (5, 7)]
    with pytest.raises(ShardError, match="3 stages for 2 layers"):
        Topology(pipeline=3).layers_of_stage(2)
    with pytest.raises(ShardError, match="expert parallel size 8 for 4 experts"):
        experts_of(Topology(expert=8), 4)

"""Which rows go where in expert parallelism: a pure arrangement."""

from __future__ import annotations

import pytest
import torch

from layers.errors import ShardError
from layers.expert_dispatch import ExpertPlaces, arrange, expert_places, share_of
from layers.parallel import StandInGroup
from layers.topology import Topology


def test_rows_lie_in_the_order_of_ranks_and_of_their_experts() -> None:
    places = ExpertPlaces(((0, 1), (2, 3)))
    sending = arrange(torch.tensor([[3, 0], [1, 2], [0, 3]]), places)
    assert sending.counts == (3, 3)
    assert sending.tokens.tolist() == [0, 2, 1, 1, 0, 2]
    assert sending.slots.tolist() == [0, 0, 1, 0, 1, 1]
    assert sending.back.tolist() == [4, 0, 2, 3, 1, 5]


def test_the_number_of_an_expert_on_its_rank_is_its_place_there() -> None:
    places = expert_places(Topology(expert=2, placement="round_robin"), 5)
    assert places.held == ((0, 2, 4), (1, 3))
    assert arrange(torch.tensor([[4, 3]]), places).slots.tolist() == [2, 1]


def test_the_tokens_of_an_expert_on_several_ranks_take_turns() -> None:
    places = ExpertPlaces(((0, 1), (1, 0), (0,)))
    chosen = torch.tensor([[0], [0], [1], [0], [0], [1]])
    assert arrange(chosen, places).counts == (3, 2, 1)
    assert arrange(chosen, places, start=1).counts == (2, 3, 1)
    assert [arrange(torch.tensor([[0]]), places, start=rank).counts for rank in range(3)] == [
        (1, 0, 0), (0, 1, 0), (0, 0, 1),
    ]  # fmt: skip


def test_nothing_is_sent_for_no_tokens() -> None:
    sending = arrange(torch.empty(0, 2, dtype=torch.int64), ExpertPlaces(((0,), (1,))))
    assert sending.counts == (0, 0)
    assert sending.tokens.shape == sending.back.shape == (0,)


def test_an_expert_that_no_rank_has_is_an_error() -> None:
    with pytest.raises(ShardError, match="leaves out expert 2"):
        expert_places(Topology(expert=2, expert_map=((0, 1), (3,))), 4)


@pytest.mark.parametrize("count", [0, 1, 5, 8])
def test_the_shares_of_a_replica_are_all_its_tokens_once(count: int) -> None:
    shares = [range(count)[share_of(count, StandInGroup(4, rank))] for rank in range(4)]
    assert [token for share in shares for token in share] == list(range(count))
    assert max(map(len, shares)) <= -(-count // 4)

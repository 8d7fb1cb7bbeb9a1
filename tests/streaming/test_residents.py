"""Which layers stay: as many as fit, as far apart as they go."""

from __future__ import annotations

from itertools import pairwise

import pytest

from streaming.residents import choose_residents, fill_up, spread


def layers(*sizes: int) -> list[tuple[str, int]]:
    return [(f"layers.{index}", size) for index, size in enumerate(sizes)]


def test_layers_that_stay_are_spread_evenly_between_those_that_are_streamed() -> None:
    assert spread(4, of=8) == [1, 3, 5, 7]
    assert spread(3, of=9) == [1, 4, 7]
    assert spread(0, of=5) == []
    assert spread(5, of=5) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("count", range(1, 41))
def test_gaps_between_layers_that_stay_differ_by_one_at_the_most(count: int) -> None:
    places = spread(count, of=40)
    assert len(set(places)) == count
    gaps = {after - before for before, after in pairwise(places)}
    assert len(gaps) <= 2
    assert max(gaps, default=0) - min(gaps, default=0) <= 1


def test_as_many_stay_as_fit() -> None:
    assert choose_residents(layers(10, 10, 10, 10), room_nbytes=25) == ("layers.1", "layers.3")
    assert choose_residents(layers(10, 10, 10, 10), room_nbytes=40) == tuple(f"layers.{i}" for i in range(4))
    assert choose_residents(layers(10, 10), room_nbytes=9) == ()
    assert choose_residents((), room_nbytes=100) == ()


def test_a_small_layer_fills_what_is_left() -> None:
    assert choose_residents(layers(10, 10, 10, 3), room_nbytes=14) == ("layers.1", "layers.3")


@pytest.mark.parametrize("room", range(0, 200, 7))
def test_the_share_of_hits_is_what_fits(room: int) -> None:
    sizes = [13] * 12
    chosen = choose_residents(layers(*sizes), room_nbytes=room)
    assert len(chosen) == min(12, room // 13)


def test_single_weights_fill_the_rest_the_largest_first() -> None:
    assert fill_up({"a": 5, "b": 9, "c": 4}, room_nbytes=13) == ("b", "c")
    assert fill_up({"a": 5}, room_nbytes=4) == ()

"""The ring that streamed weights pass through: no two of them ever lie in the same place."""

from __future__ import annotations

import random

import pytest

from streaming.read_plan import ALIGNMENT
from streaming.ring import Ring


def test_runs_lie_one_behind_the_other_at_aligned_places() -> None:
    ring = Ring(1000)
    assert [ring.place(100), ring.place(64), ring.place(1)] == [0, 128, 192]
    assert ring.held_nbytes == 165


def test_what_does_not_fit_at_the_end_begins_anew_once_there_is_room() -> None:
    ring = Ring(640)
    first, second = ring.place(320), ring.place(256)
    assert (first, second) == (0, 320)
    assert ring.place(128) is None  # 64 are left at the end
    ring.free(0)
    assert ring.place(128) == 0
    assert ring.place(320) is None  # the second run still begins at 320
    ring.free(320)
    assert ring.place(320) == 128


def test_a_run_that_is_given_back_early_waits_for_those_before_it() -> None:
    ring = Ring(300)
    for _ in range(2):
        ring.place(128)
    ring.free(128)
    assert ring.place(128) is None
    ring.free(0)
    assert ring.place(300) == 0


def test_any_run_that_fits_the_ring_fits_when_it_is_empty() -> None:
    ring = Ring(100)
    for _ in range(3):
        start = ring.place(100)
        assert start == 0
        ring.free(start)


def test_more_than_the_ring_and_runs_that_are_not_held_are_errors() -> None:
    ring = Ring(10)
    with pytest.raises(ValueError, match="11 bytes do not fit into a ring of 10"):
        ring.place(11)
    with pytest.raises(ValueError, match="no run of the ring begins at 0"):
        ring.free(0)
    ring.place(4)
    ring.free(0)
    with pytest.raises(ValueError, match="no run of the ring begins at 0"):
        ring.free(0)


@pytest.mark.parametrize("seed", range(20))
def test_held_runs_never_overlap_whatever_comes_and_goes(seed: int) -> None:
    chance = random.Random(seed)
    capacity = chance.randint(200, 5000)
    ring, held = Ring(capacity), dict[int, int]()
    placed = 0
    for _ in range(600):
        if held and chance.random() < 0.5:
            start = chance.choice(list(held))
            ring.free(start)
            del held[start]
            continue
        nbytes = chance.randint(1, capacity)
        start = ring.place(nbytes)
        if start is None:
            assert held  # an empty ring has room for anything
            continue
        placed += 1
        assert start % ALIGNMENT == 0
        assert 0 <= start <= capacity - nbytes
        assert all(start + nbytes <= other or other + size <= start for other, size in held.items())
        held[start] = nbytes
        assert ring.held_nbytes == sum(held.values())
    assert placed > 100

"""Which experts go: the policies alone, and their hit rates on routing whose skew and locality are known."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from examples.compare_expert_policies import Visit, best_hit_rate, simulated, zipf_routing
from streaming.expert_policy import POLICIES, EvictionPolicy, ExpectedUse, LeastFrequent, LeastRecent


def filled(policy: EvictionPolicy, visits: list[tuple[int, list[int]]]) -> EvictionPolicy:
    """The policy after these visits, each of which brought what was missing."""
    there = set()
    for layer, units in visits:
        policy.visit(layer, units)
        for unit in units:
            if (layer, unit) not in there:
                there.add((layer, unit))
                policy.add((layer, unit))
    return policy


def test_the_least_recently_used_goes_first() -> None:
    policy = filled(LeastRecent(2), [(0, [1, 2]), (1, [5]), (0, [1])])
    assert policy.victim(()) == (0, 2)
    assert policy.victim({(0, 2)}) == (1, 5)
    policy.remove((0, 2))
    assert policy.victim({(1, 5), (0, 1)}) is None


def test_the_least_often_used_goes_first() -> None:
    policy = filled(LeastFrequent(1), [(0, [1, 2]), (0, [2]), (0, [2]), (0, [3]), (0, [3])])
    assert policy.victim(()) == (0, 1)
    assert policy.victim({(0, 1)}) == (0, 3)


def test_by_expected_use_a_favourite_stays_though_others_are_newer() -> None:
    policy = filled(ExpectedUse(1), [*[(0, [7])] * 20, (0, [1]), (0, [2])])
    assert policy.victim(()) == (0, 1)
    assert policy.victim({(0, 1), (0, 2)}) == (0, 7)
    assert policy.victim({(0, 1), (0, 2), (0, 7)}) is None


def test_of_units_alike_the_one_whose_layer_comes_last_goes() -> None:
    visits = [(layer, [0]) for _ in range(10) for layer in range(3)]
    assert filled(ExpectedUse(3), [*visits, (0, [0])]).victim({(0, 0)}) == (2, 0)
    assert filled(ExpectedUse(3), [*visits, (0, [0]), (1, [0])]).victim({(1, 0)}) == (0, 0)


def test_chances_are_the_shares_of_visits_where_routing_has_no_memory() -> None:
    policy, draw = ExpectedUse(1), random.Random(3)
    for _ in range(3000):
        policy.visit(0, [0, *(unit for unit, share in ((1, 0.5), (2, 0.1)) if draw.random() < share)])
    chances = [policy.chance((0, unit)) for unit in range(4)]
    assert chances[0] == pytest.approx(1.0, abs=0.01)
    assert chances[1] == pytest.approx(0.5, abs=0.12)
    assert chances[2] == pytest.approx(0.1, abs=0.06)
    assert chances[3] < 0.001


def test_that_units_are_used_again_at_once_is_learnt() -> None:
    policy = ExpectedUse(1)
    for start in range(0, 2000, 2):  # each unit twice, then not for long
        policy.visit(0, [start % 97 + 1])
        policy.visit(0, [start % 97 + 1])
    policy.visit(0, [50])
    assert policy.chance((0, 50)) > 0.4
    policy.visit(0, [60])
    assert policy.chance((0, 50)) < 0.1


@pytest.mark.parametrize("skew", [0.8, 1.2])
@pytest.mark.parametrize("locality", [0.0, 0.3, 0.6])
def test_expected_use_hits_more_than_the_others_on_skewed_routing(skew: float, locality: float) -> None:
    visits = zipf_routing(layers=8, experts=32, chosen=2, tokens=200, skew=skew, locality=locality, seed=4)
    for room in (32, 64):
        lru, lfu, ours = (simulated(visits, make(8), room=room).hit_rate for make in POLICIES.values())
        assert ours > lru
        assert ours > lfu - 0.005
        assert best_hit_rate(visits, room=room) >= max(lru, lfu, ours)


def test_the_best_hit_rate_is_that_of_the_textbook() -> None:
    pages = [7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1]  # Silberschatz: 9 faults in 3 frames, LRU 12
    visits = [Visit(0, (page,)) for page in pages]
    assert best_hit_rate(visits, room=3) == pytest.approx(11 / 20)
    assert simulated(visits, LeastRecent(1), room=3).hits == 8


def test_made_up_routing_has_the_skew_and_the_repeats_that_it_says() -> None:
    visits = zipf_routing(layers=1, experts=64, chosen=1, tokens=6000, skew=1.2, locality=0.6, seed=2)
    units = [visit.units[0] for visit in visits]
    counts = sorted((units.count(unit) for unit in set(units)), reverse=True)
    assert counts[0] / counts[1] == pytest.approx(2**1.2, rel=0.25)
    same = sum(a == b for a, b in pairwise(units)) / len(units)
    chance = sum((count / len(units)) ** 2 for count in counts)
    assert same == pytest.approx(0.6 + 0.4 * chance, abs=0.03)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_gives_every_unit_once_and_then_none(name: str) -> None:
    policy, draw = POLICIES[name](3), random.Random(1)
    for _ in range(30):
        policy.visit(draw.randrange(3), draw.sample(range(6), 3))
    units = [(layer, unit) for layer in range(3) for unit in range(6)]
    for unit in units:
        policy.add(unit)
    gone = []
    while (victim := policy.victim({(0, 0)})) is not None:
        gone.append(victim)
        policy.remove(victim)
    assert sorted(gone) == units[1:]

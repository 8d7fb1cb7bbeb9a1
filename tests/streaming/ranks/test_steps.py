"""What rank 0 tells of a step, and which part of it a replica computes."""

from __future__ import annotations

import json

import pytest

from streaming.errors import WorkerError
from streaming.ranks.steps import NewCache, Step, StepPart, own_tokens, part_of

STEP = Step(tokens=((5, 6, 7), (8,), (9, 10)), caches=(4, 7, 6), lengths=(0, 3, 0), rows=(2, 3, 5), table=True)


def test_a_step_is_the_same_after_its_way_through_json() -> None:
    step = Step(STEP.tokens, STEP.caches, STEP.lengths, STEP.rows, table=False, packed=True, dropped=(1, 2))
    assert Step.of(json.loads(json.dumps(step.message()))) == step
    cache = NewCache(3, 100, dropped=(1, 2))
    assert NewCache.of(json.loads(json.dumps(cache.message()))) == cache


@pytest.mark.parametrize("change", [{"tokens": [["a"]]}, {"rows": None}, {"caches": 3}])
def test_what_is_no_step_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(WorkerError, match="cannot be understood"):
        Step.of(STEP.message() | change)


def test_one_replica_computes_the_whole_step() -> None:
    assert part_of(STEP, replica=0, replicas=1) == StepPart((0, 1, 2), rows=(2, 3, 5), places=(0, 1, 2))


def test_replicas_share_the_sequences_by_the_numbers_of_their_caches() -> None:
    even, odd = (part_of(STEP, replica=at, replicas=2) for at in (0, 1))
    assert even == StepPart((0, 2), rows=(2, 4), places=(0, 2))
    assert odd == StepPart((1,), rows=(0,), places=(1,))
    assert own_tokens(STEP, even) == [(5, 6, 7), (9, 10)]


def test_a_replica_may_have_nothing_to_compute() -> None:
    assert part_of(STEP, replica=1, replicas=8) == StepPart((), (), ())

"""The peak of memory is known from the first moment, and never falls."""

from __future__ import annotations

from contextlib import closing

from streaming.memory_watch import MemoryWatch

SHARED = 3 << 40  # more than this process could have by itself


def test_a_run_that_ends_before_the_first_interval_has_a_peak() -> None:
    with closing(MemoryWatch(shared=lambda: SHARED, pids=list, interval_s=3600)) as watch:
        assert watch.peak_nbytes > SHARED


def test_the_peak_stays_when_memory_is_given_back() -> None:
    amounts = iter([SHARED, 0])
    with closing(MemoryWatch(shared=lambda: next(amounts, 0), pids=list, interval_s=3600)) as watch:
        assert watch.sample() < SHARED < watch.peak_nbytes
    assert watch.peak_nbytes > SHARED

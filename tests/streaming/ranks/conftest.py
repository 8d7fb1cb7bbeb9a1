"""What tests of several ranks share: followers that serve many models, in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from streaming.ranks import launch
from tests.streaming.ranks.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Empty until a test asks for it."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def pooled(rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> RankPool:
    """Runs of this test, of eight ranks at most, have their followers from the pool."""
    rank_pool.fill(7)  # here, where the test's limit of time does not count
    monkeypatch.setattr(launch, "open_ranks", rank_pool.open_ranks)
    return rank_pool

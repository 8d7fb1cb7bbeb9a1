"""A rank of a real run is killed at a random moment of loading and of generating: the others name it and end."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import pytest

from tests.streaming.ranks.processes import Run, running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")

RANK_TIMEOUT_S = 20.0
FEW, ALL = range(2), range(50)


def generate(folder: Path, world: int) -> tuple[str, ...]:
    """A command line that streams its answer for some seconds."""
    return (
        "-m", "streaming", "generate", str(folder), "--ids", "1,2,3", "--max-tokens", "400", "--ignore-eos", "--quiet",
        "--tensor-parallel-size", str(world), "--rank-timeout", str(RANK_TIMEOUT_S),
    )  # fmt: skip


def kill(run: Run, rank: int, chance: random.Random, *, within_s: float) -> None:
    pid = run.await_rank(rank)
    signal.sigtimedwait([], chance.uniform(0.0, within_s))  # the random moment
    os.kill(pid, signal.SIGKILL)


def assert_the_others_name(run: Run, rank: int, *, world: int) -> None:
    assert not run.left_after(RANK_TIMEOUT_S + 5.0)
    assert run.wait() == (-signal.SIGKILL if rank == 0 else 1)
    for other in set(range(1, world)) - {rank}:
        (line,) = run.lines_of(other)
        assert f"error: rank {rank}" in line
    if rank:
        (line,) = [line for line in run.stderr.splitlines() if line.startswith("firstlayer generate: error: ")]
        assert f"error: rank {rank}" in line


@pytest.mark.parametrize("seed", [*FEW, *(pytest.param(seed, marks=pytest.mark.slow) for seed in ALL[len(FEW) :])])
def test_a_rank_killed_at_a_random_moment_is_named_by_the_others(seed: int, four_layers: Path, tmp_path: Path) -> None:
    chance, world = random.Random(seed), 4 if seed % 5 == 4 else 2
    rank = seed // 2 % world
    with running(generate(four_layers, world), tmp_path) as run:
        run.await_rank(1)
        if seed % 2:  # while it generates; else while it starts and loads
            run.await_text(" ")
            kill(run, rank, chance, within_s=1.0)
        else:
            kill(run, rank, chance, within_s=1.5)
        assert_the_others_name(run, rank, world=world)


@pytest.mark.slow
def test_an_interrupt_ends_all_ranks(four_layers: Path, tmp_path: Path) -> None:
    with running(generate(four_layers, 2), tmp_path) as run:
        run.await_text(" ")
        run.kill(0, number=signal.SIGINT)
        assert run.wait() == 1
        assert not run.left_after(RANK_TIMEOUT_S)
        assert run.stderr == "firstlayer generate: error: interrupted\n"

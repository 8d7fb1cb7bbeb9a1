"""Whatever ends a rank ends all of them: soon, each with one line that names it, and with no process left."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import pytest

from tests.streaming.ranks.processes import Run, running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")

STAND_IN = ("-m", "tests.streaming.ranks.stand_in", "lead")
SOON_S = 10.0


def assert_all_named(run: Run, rank: int, *, world: int, words: str = "") -> None:
    """Every other rank has said which one it was."""
    for other in set(range(world)) - {rank}:
        lines = run.lines_of(other)
        assert len(lines) == 1, run.stderr
        assert f"error: rank {rank}" in lines[0]
        assert words in lines[0]


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(s, marks=pytest.mark.slow) for s in range(2, 20))])
def test_a_rank_killed_at_a_random_moment_is_named_by_all_others(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    rank = seed % 3
    with running((*STAND_IN, "3", "8"), tmp_path) as run:
        ranks = [run.await_rank(other) for other in range(3)]
        signal.sigtimedwait([], chance.uniform(0.0, 0.5))  # a moment of joining, or of stepping
        os.kill(ranks[rank], signal.SIGKILL)
        assert not run.left_after(SOON_S)
        assert run.wait() == (-signal.SIGKILL if rank == 0 else 1)
        assert_all_named(run, rank, world=3)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raise", "rank 1, layer layers.3, stage read, tensor q_proj.weight: the file has shrunk"),
        (
            "exit",
            "rank 1, layer layers.3, stage quantize, tensor model.layers.3.t2: the process ended with exit status 7",
        ),
    ],
)
def test_a_rank_that_fails_is_named_with_layer_stage_and_tensor(fault: str, words: str, tmp_path: Path) -> None:
    with running((*STAND_IN, "3", "8", fault), tmp_path) as run:
        assert run.wait() == 1
        assert not run.left_after(SOON_S)
        assert run.lines_of(0) == [f"firstlayer rank 0: error: {words}"]
        assert run.lines_of(2) == [f"firstlayer rank 2: error: {words}"]


def test_a_rank_whose_main_thread_never_returns_ends_with_the_others(tmp_path: Path) -> None:
    with running((*STAND_IN, "3", "8", "stuck"), tmp_path) as run:
        run.await_rank(1)
        run.await_rank(2)
        run.kill(2)
        assert run.wait() == 1
        assert not run.left_after(SOON_S)
        assert_all_named(run, 2, world=3)


def test_a_rank_that_shows_no_sign_of_life_is_named_and_killed(tmp_path: Path) -> None:
    with running((*STAND_IN, "3", "2"), tmp_path) as run:
        run.await_text("stepping")
        run.kill(1, number=signal.SIGSTOP)
        assert run.wait() == 1
        assert not run.left_after(SOON_S)
        for rank in (0, 2):
            (line,) = run.lines_of(rank)
            assert line.startswith(f"firstlayer rank {rank}: error: rank 1, layer layers.3, stage quantize, tensor ")
            assert line.endswith(": no sign of life for 2 s")


def test_followers_do_not_wait_for_a_rank_0_that_has_stopped(tmp_path: Path) -> None:
    with running((*STAND_IN, "3", "2"), tmp_path) as run:
        run.await_text("stepping")
        run.kill(0, number=signal.SIGSTOP)
        assert run.left_after(SOON_S, but=run.process.pid) == set()
        for rank in (1, 2):
            assert run.lines_of(rank) == [f"firstlayer rank {rank}: error: rank 0: no sign of life for 2 s"]


def test_an_interrupt_ends_all_and_only_rank_0_speaks(tmp_path: Path) -> None:
    with running((*STAND_IN, "3", "8"), tmp_path) as run:
        run.await_text("stepping")
        run.kill(0, number=signal.SIGINT)
        assert run.wait() == 1
        assert not run.left_after(SOON_S)
        assert run.stderr == "firstlayer rank 0: error: interrupted\n"


def test_followers_are_out_of_reach_of_the_terminals_interrupt(tmp_path: Path) -> None:
    with running((*STAND_IN, "2", "8"), tmp_path) as run:
        run.await_text("stepping")
        follower = run.await_rank(1)
        assert os.getsid(follower) == follower != os.getsid(run.process.pid)
        assert os.getpgid(follower) != os.getpgid(run.process.pid)

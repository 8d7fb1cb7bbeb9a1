"""`LLM` and `open_llm` on ranks that are processes of their own: started, used, ended, and failing."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from safetensors.torch import load_file, save_file

from layers.sampling_params import SamplingParams
from streaming import LLM, open_llm
from streaming.errors import LayerLoadError, OptionError, RankError
from streaming.ranks import launch
from tests.streaming.waiting import until

IDS = [1, 2, 3]
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "dtype": "float32"}
FAILING = Path(__file__).with_name("failing_follower.py")


def answers(llm: LLM, *, max_tokens: int = 6) -> list[tuple[int, ...]]:
    return [done.token_ids for done in llm.complete([IDS, [9]], SamplingParams(max_tokens=max_tokens))]


@pytest.fixture(scope="module")
def expected(four_layers: Path) -> list[tuple[int, ...]]:
    """The answers of one rank."""
    with LLM(four_layers, dtype="float32") as llm:
        return answers(llm)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The followers that are started during the test."""
    found: list[subprocess.Popen[bytes]] = []
    start = launch._start_one

    def noted(*given: Any) -> subprocess.Popen[bytes]:
        found.append(start(*given))
        return found[-1]

    monkeypatch.setattr(launch, "_start_one", noted)
    return found


def failing(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Followers are of the kind that fails."""
    program = (sys.executable, str(FAILING), how)
    monkeypatch.setattr(launch, "open_ranks", partial(launch.open_ranks, program=program))


def statuses(followers: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    return [process.poll() for process in followers]


def test_a_model_on_two_ranks_answers_as_on_one_and_ends_its_followers(
    four_layers: Path, expected: list[tuple[int, ...]], started: list[subprocess.Popen[bytes]]
) -> None:
    with LLM(four_layers, **TWO) as llm:
        assert answers(llm) == expected
        llm.wait_loaded()
        assert answers(llm) == expected
        assert statuses(started) == [None]
    assert statuses(started) == [0]


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are listed in /proc")
def test_a_run_that_is_over_holds_no_descriptor(four_layers: Path) -> None:
    def run() -> int:
        with LLM(four_layers, **TWO) as llm:
            llm.logits(IDS)
        return len(os.listdir("/proc/self/fd"))

    gc.collect()  # of the tests before
    gc.disable()  # nothing is left to a collection
    try:
        assert run() == run()
    finally:
        gc.enable()


@pytest.mark.slow
def test_open_llm_starts_and_ends_ranks_too(
    four_layers: Path, expected: list[tuple[int, ...]], started: list[subprocess.Popen[bytes]]
) -> None:
    async def main() -> list[tuple[int, ...]]:
        async with open_llm(four_layers, pipeline_parallel_size=2, dtype="float32") as llm:
            return [done.token_ids for done in await llm.complete([IDS, [9]], SamplingParams(max_tokens=6))]

    assert anyio.run(main) == expected
    assert statuses(started) == [0]


def test_closing_at_once_ends_the_followers(four_layers: Path, started: list[subprocess.Popen[bytes]]) -> None:
    LLM(four_layers, **TWO).close()
    assert statuses(started) == [0]


def with_nan(folder: Path, out: Path, *, row: int) -> Path:
    """A copy of the model with a NaN in a row of layer 2's gate, of whose 96 rows rank 0 has the first 48."""
    shutil.copytree(folder, out)
    for path in out.glob("*.safetensors"):
        tensors = load_file(path)
        if (gate := tensors.get("model.layers.2.mlp.gate_proj.weight")) is not None:
            gate[row, 0] = float("nan")
            save_file(tensors, path)
    return out


def test_a_load_that_fails_on_a_follower_is_that_ranks_error_and_comes_once(
    four_layers: Path, tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    folder = with_nan(four_layers, tmp_path / "broken", row=90)
    with LLM(folder, **TWO, check_weights=True) as llm, pytest.raises(RankError, match="NaN") as caught:
        answers(llm)
    assert (caught.value.rank, caught.value.layer, caught.value.stage) == (1, "layers.2", "check")
    assert statuses(started) == [1]


@pytest.mark.slow
def test_a_load_that_fails_on_rank_0_comes_once_and_the_followers_say_whose_it_is(
    four_layers: Path, tmp_path: Path, started: list[subprocess.Popen[bytes]], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = with_nan(four_layers, tmp_path / "broken", row=2)
    with LLM(folder, **TWO, check_weights=True) as llm, pytest.raises(LayerLoadError, match="NaN"):
        answers(llm)
    assert statuses(started) == [1]
    assert "firstlayer rank 1: error: rank 0, layer layers.2, stage check" in capfd.readouterr().err


def test_a_rank_that_fails_in_a_step_is_the_error_that_the_user_gets_once(
    four_layers: Path,
    started: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    failing(monkeypatch, "raises")
    with LLM(four_layers, **TWO) as llm:
        llm.wait_loaded()
        with pytest.raises(RankError, match=r"no more numbers in layers\.0") as caught:
            answers(llm)
        assert (caught.value.rank, caught.value.layer, caught.value.stage) == (1, "layers.0", "forward")
        with pytest.raises(RankError, match="rank 1"):
            answers(llm)
    assert statuses(started) == [1]
    assert "firstlayer rank 1: error: " in capfd.readouterr().err


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_step_is_named_within_the_time_out(
    four_layers: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "hangs")
    with LLM(four_layers, **TWO, rank_timeout=8.0) as llm, pytest.raises(RankError) as caught:
        answers(llm)
    assert str(caught.value) == (
        "rank 1, layer layers.1, stage forward: keeps the others waiting in a sum (--rank-timeout 8)"
    )
    assert statuses(started) == [1]


def test_a_rank_that_is_killed_while_it_computes_is_named(
    four_layers: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    with LLM(four_layers, **TWO) as llm:
        llm.wait_loaded()
        pieces = llm.pieces([IDS], SamplingParams(max_tokens=200))
        next(pieces)
        os.kill(started[0].pid, signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank 1.*SIGKILL"):
            list(pieces)
    assert statuses(started) == [-signal.SIGKILL]


@pytest.mark.slow
def test_a_rank_that_is_killed_while_nobody_asks_is_the_error_of_the_end(
    four_layers: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    llm = LLM(four_layers, **TWO)
    llm.wait_loaded()
    os.kill(started[0].pid, signal.SIGKILL)
    until(lambda: llm._model.load_error)
    with pytest.raises(RankError, match=r"rank 1.*SIGKILL"):
        llm.close()


def test_one_layer_alone_is_loaded_on_one_rank(four_layers: Path) -> None:
    with pytest.raises(OptionError, match="runs on one rank, not on the 2"):
        LLM.load_layer(four_layers, 0, tensor_parallel_size=2)

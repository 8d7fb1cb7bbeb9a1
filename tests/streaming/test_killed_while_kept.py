"""A run that is killed while it writes stored forms: the next one neither trusts a part nor fails."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from examples.write_tiny_model import TinyModel
from tests.streaming.limits import limit_of

MODEL = TinyModel(layers=8, hidden_size=256, intermediate_size=768, heads=8, kv_heads=8, head_dim=32)
IDS = "5,9,2,7"


def command(folder: Path, cache: Path, limit: int) -> list[str]:
    return [
        sys.executable, "-m", "streaming", "generate", str(folder), "--ids", IDS, "--max-tokens", "4", "--ignore-eos",
        "--quantization", "int8_per_channel", "--memory", str(limit), "--max-model-len", "64", "--json",
        "--cache-dir", str(cache),
    ]  # fmt: skip


def tokens_of(folder: Path, cache: Path, limit: int) -> list[int]:
    done = subprocess.run(command(folder, cache, limit), check=True, capture_output=True, text=True)
    assert done.stderr == ""
    found: list[int] = json.loads(done.stdout)["token_ids"]
    return found


def data_nbytes(cache: Path) -> int:
    return sum(file.stat().st_size for file in cache.rglob("data.bin"))


def killed(folder: Path, cache: Path, limit: int, *, delay_s: float) -> bool:
    """Start a run and kill it so long after its first byte is kept; whether it still ran then."""
    before = data_nbytes(cache)
    process = subprocess.Popen(command(folder, cache, limit), stdout=subprocess.PIPE, start_new_session=True)
    try:
        while process.poll() is None and data_nbytes(cache) <= before:
            time.sleep(0.001)
        time.sleep(delay_s)
        return process.poll() is None
    finally:
        with suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("kills", [50])
def test_runs_killed_at_random_moments_leave_a_cache_that_gives_the_same_tokens(
    kills: int, tiny_folder: Callable[[TinyModel], Path], tmp_path: Path
) -> None:
    signal.setitimer(signal.ITIMER_REAL, 600)  # of many processes, one after the other
    folder, chance = tiny_folder(MODEL), random.Random(kills)
    limit = limit_of(folder, 0.0, quantization="int8_per_channel", max_model_len=64)
    expected = tokens_of(folder, tmp_path / "whole", limit)
    whole = data_nbytes(tmp_path / "whole")
    in_the_middle = 0
    cache = tmp_path / "0"
    for number in range(kills):
        if number % 5 == 0:  # else what the last one left is written on
            cache = tmp_path / str(number)
        in_the_middle += killed(folder, cache, limit, delay_s=chance.random() * 0.05) and data_nbytes(cache) < whole
        if number % 5 == 4 or number == kills - 1:
            assert tokens_of(folder, cache, limit) == expected
            assert tokens_of(folder, cache, limit) == expected
    assert in_the_middle > 0

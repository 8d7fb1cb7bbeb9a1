"""Another memory limit while a model runs: the same tokens, never more held than allowed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from examples.write_tiny_model import TinyModel
from layers.sampling_params import SamplingParams
from streaming import LLM, open_llm
from streaming.errors import BudgetError, OptionError
from streaming.prepare import STREAMED_CACHE_TOKENS
from tests.layers.tiny import some_ids
from tests.streaming.leftovers import nothing_left
from tests.streaming.limits import limit_of, limits_of
from tests.streaming.waiting import until

IDS = some_ids(7, vocab_size=101, seed=3)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=STREAMED_CACHE_TOKENS + 100, ignore_eos=True)
Tiny = Callable[[TinyModel], Path]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRSTLAYER_CACHE", str(tmp_path / "cache"))


def tokens_of(llm: LLM) -> tuple[int, ...]:
    return llm.complete([IDS], GREEDY)[0].token_ids


def held_nbytes(llm: LLM) -> int:
    """What the model holds by its own account: all but the weights as the budget has it, and these as they are."""
    stream, budget = llm.model.runner.stream, llm.model.budget
    assert stream is not None
    units = {unit.param.name for unit in stream.units}
    stored = {name: tensors for name, tensors in llm.model.runner.device.stored.items() if name not in units}
    base = sum(tensor.nbytes for tensors in stored.values() for tensor in tensors.values())
    others = budget.window_nbytes + budget.convert_nbytes + budget.cache_nbytes + budget.experts_nbytes
    return base + others + stream.held_nbytes


@contextmanager
def changing(llm: LLM, limits: list[int], over: list[tuple[int, int]]) -> Iterator[None]:
    """For the block, one limit after the other is set; whatever is held beyond one is noted in `over`."""
    done = threading.Event()

    def change() -> None:
        for limit in limits:
            llm.set_memory(limit)
            if llm.model.runner.stream is not None and (held := held_nbytes(llm)) > limit:
                over.append((limit, held))
        done.set()

    thread = threading.Thread(target=change, name="test-limits")
    thread.start()
    try:
        yield
        until(done.is_set)
    finally:
        thread.join(30)


@pytest.mark.parametrize("options", [{}, {"quantization": "int8_per_channel"}, {"dtype": "float32", "cache_size": 0}])
def test_a_hundred_changes_while_it_generates_change_no_token(options: dict[str, Any], tiny_folder: Tiny) -> None:
    folder = tiny_folder(TinyModel(layers=6))
    options = {"max_model_len": 64, "reader": "threads", **options}
    with LLM(folder, **options) as llm:
        expected, logits = tokens_of(llm), llm.logits(IDS)
    least, whole = limits_of(folder, **options)
    chance = random.Random(7)
    limits = [chance.randint(least + whole // 8, whole + whole // 8) for _ in range(100)]
    over: list[tuple[int, int]] = []
    with LLM(folder, memory=limit_of(folder, 0.4, **options), **options) as llm:
        with changing(llm, limits, over):
            for _ in range(4):
                assert tokens_of(llm) == expected
        assert torch.equal(llm.logits(IDS), logits)
        assert llm.stats().limit_bytes == limits[-1]
    assert over == []


def test_a_model_that_was_loaded_whole_shrinks_and_grows_back(tiny_folder: Tiny) -> None:
    folder = tiny_folder(TinyModel(layers=6))
    least, whole = limits_of(folder, max_model_len=64)
    with LLM(folder, max_model_len=64) as llm:
        expected = tokens_of(llm)
        assert llm.stats().stream == {}
        llm.set_memory(limit_of(folder, 0.3, max_model_len=64))
        assert tokens_of(llm) == expected
        small = llm.stats().stream
        assert small["pass_bytes"] > 0
        assert held_nbytes(llm) <= limit_of(folder, 0.3, max_model_len=64)
        llm.set_memory(2 * whole)
        assert tokens_of(llm) == expected  # what stays again comes by
        grown = llm.stats().stream
        assert grown["pass_bytes"] == 0
        assert grown["hit_rate"] == 1.0
        came = grown["streamed_bytes"]
        assert tokens_of(llm) == expected
        assert llm.stats().stream["streamed_bytes"] == came
        llm.set_memory(least + llm.stats().stream["ring_bytes"])
        assert tokens_of(llm) == expected


def test_memory_that_is_given_back_is_given_back(tiny_folder: Tiny) -> None:
    """By the system's own account: pages of weights that were loaded with the layers, and of those in the arena."""
    folder = tiny_folder(TinyModel(layers=4, hidden_size=512, intermediate_size=2048, heads=8, kv_heads=8, head_dim=64))
    for options in ({}, {"quantization": "int8_per_channel"}):
        with LLM(folder, max_model_len=64, reader="process", **options) as llm:
            tokens_of(llm)
            before = _resident_nbytes(llm)
            llm.set_memory(limit_of(folder, 0.1, max_model_len=64, **options))
            gone = before - _resident_nbytes(llm)
            stream = llm.model.runner.stream
            assert stream is not None
            wanted = stream.plan.pass_nbytes - stream.plan.ring_nbytes
            assert gone > 0.4 * wanted, (gone, wanted)  # the rest of the process grows and shrinks as well


def _resident_nbytes(llm: LLM) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file if ":" in line)
    return sum(int(fields[key].split()[0]) << 10 for key in ("RssAnon", "RssShmem"))


def test_where_the_ring_leaves_too_little_it_becomes_smaller(tiny_folder: Tiny) -> None:
    folder = tiny_folder(TinyModel(layers=6))
    least, whole = limits_of(folder, max_model_len=64)
    with LLM(folder, memory=limit_of(folder, 0.6, max_model_len=64), max_model_len=64) as llm:
        expected, ring = tokens_of(llm), llm.stats().stream["ring_bytes"]
        llm.set_memory(least)  # what it can be opened with it can be set to
        assert llm.stats().stream["ring_bytes"] < ring
        assert held_nbytes(llm) <= least
        assert tokens_of(llm) == expected
        over: list[tuple[int, int]] = []
        with changing(llm, [least, whole, least, limit_of(folder, 0.5, max_model_len=64), least] * 4, over):
            for _ in range(4):
                assert tokens_of(llm) == expected
        assert over == []


def test_a_limit_that_is_too_small_changes_nothing(tiny_folder: Tiny) -> None:
    folder = tiny_folder(TinyModel(layers=4))
    limit = limit_of(folder, 0.3, max_model_len=64)
    with LLM(folder, memory=limit, max_model_len=64) as llm:
        expected, before = tokens_of(llm), llm.stats().stream
        with pytest.raises(BudgetError, match=r"--memory 1\.0 KiB is too small even to stream the weights"):
            llm.set_memory(1024)
        with pytest.raises(OptionError, match="--memory 'much': a size such as 512MiB or 12GiB is needed"):
            llm.set_memory("much")
        with pytest.raises(OptionError, match=r"set_memory\(None\): a size such as 512MiB"):
            llm.set_memory(None)  # type: ignore[arg-type]
        assert llm.stats().stream["pass_bytes"] == before["pass_bytes"]
        assert llm.stats().limit_bytes == limit
        assert tokens_of(llm) == expected


def test_the_asynchronous_model_changes_its_limit_too(tiny_folder: Tiny) -> None:
    folder = tiny_folder(TinyModel(layers=4))

    async def run() -> None:
        async with open_llm(folder, max_model_len=64) as llm:
            (before,) = await llm.complete([IDS], GREEDY)
            await llm.set_memory(limit_of(folder, 0.3, max_model_len=64))
            (after,) = await llm.complete([IDS], GREEDY)
            assert after.token_ids == before.token_ids
            assert llm.stats().stream["pass_bytes"] > 0

    anyio.run(run)


def test_nothing_is_left_of_a_model_that_began_to_stream(tiny_folder: Tiny) -> None:
    folder = tiny_folder(TinyModel(layers=4))
    limit = limit_of(folder, 0.3, max_model_len=64)

    def run() -> None:
        with LLM(folder, max_model_len=64) as llm:
            llm.set_memory(limit)
            tokens_of(llm)

    run()
    with nothing_left():
        run()


# --- KV caches and weights that stay share one limit


def test_long_answers_take_the_place_of_weights_that_stay_and_give_it_back(tiny_folder: Tiny) -> None:
    folder = tiny_folder(TinyModel(layers=4, kv_heads=4))
    with LLM(folder) as llm:
        long = llm.complete([IDS], LONG)[0].token_ids
        short = tokens_of(llm)
    least, whole = limits_of(folder)
    limit = whole - (whole - least) // 3
    with LLM(folder, memory=limit) as llm:
        assert tokens_of(llm) == short
        before = llm.stats().stream["pass_bytes"]
        found = llm.complete([IDS], SamplingParams(max_tokens=STREAMED_CACHE_TOKENS + 100, ignore_eos=True))[
            0
        ].token_ids
        assert found == long
        during = llm.stats()
        assert during.stream["pass_bytes"] > before
        assert during.peak_budget_bytes <= limit
        assert tokens_of(llm) == short
        assert llm.stats().stream["pass_bytes"] == before


def test_a_cache_that_even_streaming_leaves_no_room_for_is_refused(tiny_folder: Tiny) -> None:
    folder = tiny_folder(TinyModel(layers=4, kv_heads=4))
    least, _ = limits_of(folder)
    with LLM(folder, memory=least + 1000) as llm:
        tokens_of(llm)
        with pytest.raises(BudgetError, match="is too small for a cache of 512 tokens"):
            llm.complete([IDS], SamplingParams(max_tokens=2000, ignore_eos=True))
        tokens_of(llm)

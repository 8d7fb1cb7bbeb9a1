"""More requests than there is room for: they take turns, each admitted before its cache is allocated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from examples.write_tiny_model import TinyModel
from layers.kv_cache import KVCache
from layers.sampling_params import SamplingParams
from streaming import LLM, BudgetError, Completion, Hooks, LoadOptions, OptionError, Piece, open_llm
from streaming.answers import Request
from streaming.prepare import prepare
from streaming.waves import MOST_ANSWERS, PROMPT_TOKENS, Caches, Waves

PROMPTS = [[5, 9, 2], [1], [33, 8, 120, 64], [7, 7], [90, 3]]


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[[TinyModel], Path]) -> Path:
    return tiny_folder(TinyModel(layers=3, dtype="float32", seed=11))


def params(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


class Rows:
    """How many rows each step of the model has."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.hooks = Hooks(layer_outputs=self._note)

    def _note(self, layer: str, hidden: torch.Tensor) -> None:
        if layer == "layers.0":
            self.steps.append(hidden.shape[0])


def limit_of(folder: Path, **options: Any) -> int:
    """Just enough for one cache of 512 tokens, the whole context."""
    return prepare(str(folder), LoadOptions(**options)).budget.peak_nbytes


# --- by memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["auto", "int8"])
def test_prompts_that_do_not_fit_together_take_turns_within_the_limit(kept: str, folder: Path) -> None:
    """Two prompts of 512 tokens, where one cache of as many was planned for."""
    limit = limit_of(folder, kv_cache_dtype=kept)
    with LLM(folder, memory=limit, kv_cache_dtype=kept) as llm:
        alone = llm.complete([[5] * 500], params(1000))[0].token_ids
        found = llm.complete([[5] * 500] * 3, params(1000))
        stats = llm.stats()
    assert [answer.token_ids for answer in found] == [alone] * 3
    assert [answer.index for answer in found] == [0, 1, 2]
    assert (len(alone), stats.passes) == (12, 36)
    assert stats.peak_budget_bytes <= limit


def test_the_next_begins_as_soon_as_one_has_ended(folder: Path) -> None:
    """Caches of 32 tokens have room: two of 12, and a smaller one. Who waits joins a step in which the others go on."""
    each = [params(4), *(params(12 - len(ids)) for ids in PROMPTS[1:])]
    with LLM(folder) as llm:
        expected = [llm.complete([ids], one)[0].token_ids for ids, one in zip(PROMPTS, each, strict=True)]
    rows = Rows()
    with LLM(folder, memory=limit_of(folder, max_model_len=32), max_model_len=32, hooks=rows.hooks) as llm:
        found = llm.complete(PROMPTS, each)
        ended = [answer.index for answer in llm.completions]
        total = sum(len(tokens) for tokens in expected)
        assert llm.stats().tokens_per_pass == total / len(rows.steps)
    assert [answer.token_ids for answer in found] == expected
    assert ended == [0, 2, 1, 3, 4]
    assert rows.steps[:6] == [3 + 1 + 4, 3, 3, 3, 2, 2]  # the fourth token of 0 is its last, and frees too little
    assert rows.steps[8:12] == [1 + 2, 2, 2, 1 + 2]  # 3 joins when 2 has ended, and 4 when 1 has


def test_a_prompt_that_cannot_fit_is_refused_before_any_is_computed(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100_000}))
    rows = Rows()
    with LLM(copy, memory=limit_of(copy), hooks=rows.hooks) as llm:
        words = r"^--memory .* is too small for a cache of 90003 tokens: .* are needed; ask for fewer tokens or a"
        with pytest.raises(BudgetError, match=words):
            llm.complete(PROMPTS, [params(3), params(3), params(3), params(3), params(90_001)])
        assert rows.steps == []
        assert len(llm.complete(PROMPTS[:1], params(3))[0].token_ids) == 3  # and the model goes on


# --- by the size of a step ------------------------------------------------------------------------------------------


def waves_of(lengths: Sequence[int], *, fits: Callable[[int], bool] = lambda tokens: True) -> Waves:
    requests = [Request((1,) * length, params(8)) for length in lengths]
    caches = Caches(lambda tokens: cast(KVCache, object()), fits)
    return Waves.of(requests, tokenizer=None, caches=caches)


def begun(waves: Waves) -> list[int]:
    """The answers that begin now, once what has begun before is under way."""
    before = len(waves.active)
    waves.admit()
    return [answer.index for answer in waves.active[before:]]


def test_the_prompts_that_begin_in_one_step_are_bounded() -> None:
    half = PROMPT_TOKENS // 2
    waves = waves_of([half, half, 1, 5, PROMPT_TOKENS + 9, 3])
    assert [begun(waves) for _ in range(5)] == [[0, 1], [2, 3], [4], [5], []]


def test_the_answers_of_one_step_are_bounded() -> None:
    waves = waves_of([1] * (MOST_ANSWERS + 3))
    assert len(begun(waves)) == MOST_ANSWERS
    assert begun(waves) == []
    for answer in waves.active[:2]:
        answer.finish_reason = "length"
    waves.drop_finished()
    assert begun(waves) == [MOST_ANSWERS, MOST_ANSWERS + 1]


def test_who_does_not_fit_is_not_overtaken() -> None:
    waves = waves_of([1, 90, 1], fits=lambda tokens: tokens < 50)
    assert [begun(waves) for _ in range(2)] == [[0], []]
    waves.active[0].finish_reason = "stop"
    waves.drop_finished()
    assert begun(waves) == [1, 2]  # where none is active the cache itself says whether there is room


# --- asking ---------------------------------------------------------------------------------------------------------


def test_more_prompts_than_one_step_takes_are_answered_each_as_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streaming.waves.MOST_ANSWERS", 4)
    prompts, rows = [[1 + index, 5, 2] for index in range(11)], Rows()
    with LLM(folder, hooks=rows.hooks) as llm:
        found = llm.complete(prompts, params(3))
        assert rows.steps == [12, 4, 4] * 2 + [9, 3, 3]
        assert [answer.index for answer in found] == list(range(11))
        for answer in found:
            assert answer.token_ids == llm.complete([prompts[answer.index]], params(3))[0].token_ids


def test_each_prompt_may_have_params_of_its_own(folder: Path) -> None:
    with LLM(folder) as llm:
        found = llm.complete(PROMPTS, [params(count) for count in (5, 1, 3, 2, 4)])
        assert [len(answer.token_ids) for answer in found] == [5, 1, 3, 2, 4]
        pieces = list(llm.pieces(PROMPTS[:2], [params(2), params(1)]))
        assert [piece.index for piece in pieces] == [0, 1, 0]
        with pytest.raises(OptionError, match=r"^5 prompts and 2 params were given: one for each, or one for all$"):
            llm.complete(PROMPTS, [params(1)] * 2)


def test_answers_come_as_they_end(folder: Path) -> None:
    with LLM(folder) as llm:
        found = list(llm.answers(PROMPTS[:3], [params(count) for count in (5, 1, 3)]))
    assert [answer.index for answer in found] == [1, 2, 0]
    assert all(isinstance(answer, Completion) for answer in found)


def test_the_asynchronous_face_takes_turns_alike(folder: Path) -> None:
    import anyio

    async def main() -> tuple[list[Completion], list[Piece]]:
        async with open_llm(folder, memory=limit_of(folder)) as llm:
            found = await llm.complete([[5] * 500] * 2, params(1000))
            return found, [piece async for piece in llm.pieces([[5] * 500] * 2, params(2))]

    found, pieces = anyio.run(main)
    assert [len(answer.token_ids) for answer in found] == [12, 12]
    assert found[0].token_ids == found[1].token_ids
    assert [piece.token_id for piece in pieces] == [*found[0].token_ids[:2]] * 2

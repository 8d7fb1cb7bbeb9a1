"""What a user can ask for is the same on two ranks as on one: number formats, caches, sampling, ends of answers;
requests one after the other, and closing in the middle of one. The followers are those of the pool."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from layers.sampling_params import SamplingParams
from quant.registry import scheme_names
from streaming import LLM, StreamClosedError
from tests.streaming.ranks.rank_pool import RankPool

PROMPTS = ([1, 2, 3], [9, 4, 4, 7])
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.9, top_p=0.9, seed=5)
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}
Tokens = list[tuple[int, ...]]
Answers = tuple[Tokens, Tokens, torch.Tensor]

OPTIONS: dict[str, dict[str, Any]] = {
    **{scheme: {"quantization": scheme} for scheme in scheme_names()},
    "head": {"quantization": "int8_per_channel", "quantize_head": True},
    "fast": {"kernels": "fast"},
    "int8 activations": {"activation_dtype": "int8", "quantization": "int4_per_group"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "int4 cache": {"kv_cache_dtype": "int4"},
}
ALWAYS = (  # scales that ranks agree on while loading, those that they agree on in every step, and those of heads
    "fp8_per_block", "int8 activations", "int8 cache",
)  # fmt: skip


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> Tokens:
    return [done.token_ids for done in llm.complete(PROMPTS, params)]


@pytest.fixture(scope="module")
def on_one(four_layers: Path) -> Callable[[str], Answers]:
    """What one rank gives under the options of this name."""
    return cache(lambda name: answers(four_layers, **OPTIONS[name]))


def answers(folder: Path, **options: Any) -> Answers:
    with LLM(folder, dtype="float32", **options) as llm:
        return tokens(llm), tokens(llm, SAMPLED), llm.logits(PROMPTS[1])


@pytest.mark.parametrize("ranks", [TWO, STAGES], ids=["tp", "pp"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.slow]) for name in OPTIONS]
)
def test_greedy_and_sampled_tokens_are_those_of_one_rank(
    name: str, ranks: dict[str, Any], four_layers: Path, on_one: Callable[[str], Answers], pooled: RankPool
) -> None:
    greedy, sampled, logits = answers(four_layers, **OPTIONS[name], **ranks)
    assert (greedy, sampled) == on_one(name)[:2]
    torch.testing.assert_close(logits, on_one(name)[2], rtol=1e-5, atol=1e-4)


def test_an_answer_ends_at_the_same_id(four_layers: Path, tmp_path: Path, pooled: RankPool) -> None:
    with LLM(four_layers, **TWO) as llm:
        free = tokens(llm)[0]
    shutil.copytree(four_layers, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"eos_token_id": free[3]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(tmp_path, **TWO) as llm:
        (done,) = llm.complete([PROMPTS[0]], SamplingParams(max_tokens=8))
    assert done.finish_reason == "stop"
    assert done.token_ids == free[: free.index(free[3]) + 1]


def test_requests_follow_each_other_and_one_that_is_given_up_leaves_nothing_behind(
    four_layers: Path, pooled: RankPool
) -> None:
    with LLM(four_layers, **TWO) as llm:
        first = tokens(llm)
        given_up = llm.pieces(PROMPTS, SamplingParams(max_tokens=100, ignore_eos=True))
        assert len(list(islice(given_up, 5))) == 5
        given_up.close()  # type: ignore[attr-defined]
        assert tokens(llm) == first
        conversation = [*PROMPTS[0], *first[0]]
        (again,) = llm.complete([conversation], SamplingParams(max_tokens=2, ignore_eos=True))
        (longer,) = llm.complete([PROMPTS[0]], SamplingParams(max_tokens=10, ignore_eos=True))
        assert [*first[0], *again.token_ids] == list(longer.token_ids)


def test_closing_in_the_middle_of_an_answer_ends_it_and_the_run(four_layers: Path, pooled: RankPool) -> None:
    llm = LLM(four_layers, **TWO)
    pieces = llm.pieces(PROMPTS, SamplingParams(max_tokens=400, ignore_eos=True))
    next(pieces)
    llm.close()
    with pytest.raises(StreamClosedError):
        list(pieces)

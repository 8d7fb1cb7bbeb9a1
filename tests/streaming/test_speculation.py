"""Guessed tokens that one pass checks: the same answers as without, in fewer passes, whoever guesses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch

from examples.write_tiny_model import TinyModel
from layers.sampling_params import SamplingParams
from streaming import LLM, Completion, Piece
from streaming.draft_model import DraftModel
from streaming.speculation import MOST_PROPOSED, PromptLookup, Wanted, shared_out, tie_tolerance
from tests.layers.family_cases import FAMILY_CASES
from tests.streaming.ranks.threaded import open_ranked
from tests.test_against_transformers import write_checkpoint

PROMPTS = [[5, 9, 2, 7, 5, 9, 2], [1], [33, 8, 120, 64, 3, 90, 11, 12, 13] * 9]  # the last beyond gemma2's window
FAMILIES = ("llama", "qwen3", "gemma2", "deepseek_v3", "mixtral")
COUNT = 24


@dataclass
class Guesser:
    """Knows the plain answers. Guesses a seeded number of their tokens, then goes wrong; or is always `right`."""

    answers: Sequence[Sequence[int]]
    prompts: Sequence[Sequence[int]]
    seed: int = 0
    right: bool = False
    nbytes: int = 0
    forgotten: int = 0

    def __post_init__(self) -> None:
        self._random = Random(self.seed)

    def proposer(self) -> Guesser:
        return self

    def begin(self) -> None:
        """Nothing to bring."""

    def propose(self, wanted: Sequence[Wanted], *, stop: Callable[[], None]) -> list[list[int]]:
        return [self._guess(one) for one in wanted]

    def _guess(self, wanted: Wanted) -> list[int]:
        told = len(wanted.tokens) - len(self.prompts[wanted.index])
        if self.right:
            return list(self.answers[wanted.index][told : told + wanted.most])
        found = list(self.answers[wanted.index][told : told + self._random.randint(0, wanted.most)])
        if found and self._random.random() < 0.6:
            place = self._random.randrange(len(found))
            found[place] = (found[place] + 1) % 101
        return found

    def forget(self, index: int) -> None:
        self.forgotten += 1


def answers_of(llm: LLM, prompts: Sequence[Sequence[int]], count: int = COUNT, **how: Any) -> list[Completion]:
    return llm.complete(prompts, SamplingParams(max_tokens=count, ignore_eos=True, **how))


def guessing(llm: LLM, prompts: Sequence[Sequence[int]], plain: Sequence[Completion], seed: int = 0) -> Guesser:
    guesser = Guesser([answer.token_ids for answer in plain], prompts, seed)
    llm.model.draft = cast(DraftModel, guesser)
    return guesser


@pytest.fixture(scope="module")
def folder_of(
    tiny_folder: Callable[[TinyModel], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    def folder(family: str) -> Path:
        if family in ("llama", "qwen3", "gemma2"):
            return tiny_folder(TinyModel(family=family, layers=2, dtype="float32", seed=4))
        path = tmp_path_factory.mktemp(family)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            transformers = import_module("transformers")
            transformers.logging.set_verbosity_error()
            model_type, changes = FAMILY_CASES[family]
            write_checkpoint(transformers, model_type, {**changes, "vocab_size": 160}, folder=path)
        return path

    return folder


@pytest.fixture(scope="module")
def llm(folder_of: Callable[[str], Path]) -> Iterator[LLM]:
    with LLM(folder_of("llama")) as opened:
        yield opened


# --- the same answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    [one if one in ("llama", "mixtral") else pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES],
)
def test_in_float32_the_tokens_are_those_of_plain_greedy(family: str, folder_of: Callable[[str], Path]) -> None:
    """Right and wrong guesses, of all sequences of a batch at once, each accepted for itself."""
    prompts = [ids[:60] for ids in PROMPTS] if family in ("deepseek_v3", "mixtral") else PROMPTS
    with LLM(folder_of(family)) as llm:
        plain = answers_of(llm, prompts)
        passes = llm.stats().passes
        assert answers_of(llm, prompts, speculate=3) == plain  # by prompt lookup
        for seed in range(3):
            guesser = guessing(llm, prompts, plain, seed)
            assert answers_of(llm, prompts, speculate=5) == plain
            stats = llm.stats()
            assert stats.passes < passes
            assert 0 < stats.accepted_tokens < stats.proposed_tokens
            assert guesser.forgotten == len(prompts)


@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_cache_in_few_bits_is_cut_back_alike(family: str, name: str, folder_of: Callable[[str], Path]) -> None:
    with LLM(folder_of(family), kv_cache_dtype=name) as llm:
        plain = answers_of(llm, PROMPTS)
        guessing(llm, PROMPTS, plain)
        assert answers_of(llm, PROMPTS, speculate=5) == plain


def test_the_repetition_penalty_counts_the_accepted_tokens(llm: LLM) -> None:
    plain = answers_of(llm, PROMPTS, repetition_penalty=1.3)
    assert plain != answers_of(llm, PROMPTS)
    guessing(llm, PROMPTS, plain)
    assert answers_of(llm, PROMPTS, repetition_penalty=1.3, speculate=5) == plain


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_an_answer_has_no_more_tokens_than_asked_for(count: int, llm: LLM) -> None:
    plain = answers_of(llm, PROMPTS, count)
    guessing(llm, PROMPTS, answers_of(llm, PROMPTS))
    assert answers_of(llm, PROMPTS, count, speculate=8) == plain
    assert [len(answer.token_ids) for answer in plain] == [count] * 3


def test_pieces_are_the_same_one_for_each_token(llm: LLM) -> None:
    def of_second(speculate: int) -> list[Piece]:
        params = SamplingParams(max_tokens=COUNT, ignore_eos=True, speculate=speculate)
        return [piece for piece in llm.pieces(PROMPTS, params) if piece.index == 1]

    plain = of_second(0)
    guessing(llm, PROMPTS, answers_of(llm, PROMPTS))
    assert of_second(4) == plain
    assert len(plain) == COUNT


def test_a_stop_id_among_guesses_ends_the_answer(llm: LLM) -> None:
    from streaming.answers import Request

    plain = answers_of(llm, PROMPTS[:1])
    tokens = plain[0].token_ids
    place = next(place for place in range(3, COUNT) if tokens[place] not in tokens[:place])
    llm.model.draft = cast(DraftModel, Guesser([tokens], PROMPTS, right=True))
    params = SamplingParams(max_tokens=COUNT, speculate=8)
    request = Request(tuple(PROMPTS[0]), params, frozenset({tokens[place]}))
    found = [event for event in llm.model.submit([request], None).results() if isinstance(event, Completion)]
    assert [(answer.token_ids, answer.finish_reason) for answer in found] == [(tokens[: place + 1], "stop")]


def test_ranks_cut_their_caches_back_too(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    with LLM(folder) as llm:
        plain = answers_of(llm, PROMPTS)
    with open_ranked(folder, tensor_parallel_size=2) as ranked:
        guesser = Guesser([answer.token_ids for answer in plain], PROMPTS)
        ranked.model.draft = cast(DraftModel, guesser)
        from streaming.answers import Request

        params = SamplingParams(max_tokens=COUNT, speculate=5)
        requests = [Request(tuple(ids), params) for ids in PROMPTS]
        events = ranked.model.submit(requests, None).results()
        found = {event.index: event.token_ids for event in events if isinstance(event, Completion)}
        assert ranked.model.stats().accepted_tokens > 0
    assert [found[index] for index in range(3)] == [answer.token_ids for answer in plain]


@pytest.mark.parametrize("seed", range(4))
def test_in_bfloat16_an_answer_first_differs_only_where_the_two_likeliest_are_nearly_equal(
    seed: int, tiny_folder: Callable[[TinyModel], Path]
) -> None:
    with LLM(tiny_folder(TinyModel(layers=2, seed=seed))) as llm:
        plain = answers_of(llm, PROMPTS, 48)
        guessing(llm, PROMPTS, plain, seed)
        for before, after in zip(plain, answers_of(llm, PROMPTS, 48, speculate=6), strict=True):
            pairs = zip(before.token_ids, after.token_ids, strict=True)
            place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
            if place is not None:
                row = llm.logits([*before.prompt_ids, *before.token_ids[:place]])[-1]
                first, second = row.topk(2).values
                assert first - second <= tie_tolerance(row, torch.bfloat16)


# --- fewer passes ---------------------------------------------------------------------------------------------------


def test_without_a_guess_each_pass_gives_a_token(llm: LLM) -> None:
    answers_of(llm, PROMPTS[:1])
    stats = llm.stats()
    assert (stats.passes, stats.tokens_per_pass, stats.proposed_tokens) == (COUNT, 1.0, 0)


def test_right_guesses_alone_give_as_many_tokens_a_pass_and_one(llm: LLM) -> None:
    plain = answers_of(llm, PROMPTS[:1], 21)
    llm.model.draft = cast(DraftModel, Guesser([plain[0].token_ids], PROMPTS, right=True))
    assert answers_of(llm, PROMPTS[:1], 21, speculate=4) == plain
    stats = llm.stats()
    assert (stats.passes, stats.proposed_tokens, stats.accepted_tokens) == (5, 16, 16)  # 1 and 4 x (4 + 1)
    assert stats.tokens_per_pass == 21 / 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "least"),
    [("one, two, three, four, one, two, three, four, one, two, three, four, one,", 2.0), ("The sea is", 1.0)],
)
def test_tokens_a_pass_of_the_demo_model(text: str, least: float) -> None:
    with LLM("demo") as llm:
        params = SamplingParams(max_tokens=40, ignore_eos=True, speculate=6)
        llm.complete([text], params)
        stats = llm.stats()
    assert stats.tokens_per_pass is not None
    assert stats.tokens_per_pass > least or stats.tokens_per_pass == least == 1.0
    assert stats.passes + stats.accepted_tokens == 40


# --- what was guessed from the text ---------------------------------------------------------------------------------


def proposed(tokens: Sequence[int], most: int) -> list[int]:
    (found,) = PromptLookup().propose([Wanted(0, tokens, most, 1000)], stop=lambda: None)
    return list(found)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6]),  # behind the last three
        ([1, 2, 3, 7, 7, 1, 2, 3, 8, 8, 8, 1, 2, 3], [8, 8, 8]),  # the latest of two places
        ([9, 2, 3, 7, 7, 7, 1, 2, 3], [7, 7, 7]),  # the last two
        ([4, 5, 6, 7, 1, 4], [5, 6, 7]),  # the last one
        ([1, 2, 1, 2], [1, 2, 1]),  # goes round
        ([7, 7], [7, 7, 7]),
        ([1, 2, 3], []),  # nothing has come before
        ([5], []),
        ([65536, 1, 256, 9], []),  # bytes that lie across two tokens are no token
    ],
)
def test_lookup_proposes_what_followed_the_last_time(tokens: list[int], expected: list[int]) -> None:
    assert proposed(tokens, 3) == expected


def test_lookup_follows_a_sequence_as_it_grows() -> None:
    """What is kept of the text is what a new look at all of it finds."""
    random, lookup, tokens = Random(1), PromptLookup(), [1]
    for _ in range(200):
        tokens.append(random.randrange(4))
        (found,) = lookup.propose([Wanted(3, tokens, 4, 1000)], stop=lambda: None)
        assert list(found) == proposed(tokens, 4)


def test_a_step_checks_a_bounded_number_of_guesses() -> None:
    assert shared_out([3, 0, 2]) == [3, 0, 2]
    assert shared_out([MOST_PROPOSED - 1, 5, 5]) == [MOST_PROPOSED - 1, 1, 0]


@pytest.mark.parametrize("value", [-1, 65, 1.5, True])
def test_a_number_of_guesses_that_makes_no_sense_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=f"^speculate is {value!r}: it must be an integer of at least 0 and at"):
        SamplingParams(speculate=value)


def test_guesses_do_not_go_with_a_temperature() -> None:
    with pytest.raises(ValueError, match=r"^speculate is 4 and temperature is 0\.7: .* goes with temperature 0 alone$"):
        SamplingParams(speculate=4, temperature=0.7)

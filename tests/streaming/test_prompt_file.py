"""Prompts of a file: one a line, or JSON Lines, each with its own length; answered in the file's order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.write_tiny_model import TinyModel, write_tiny_model
from streaming import LLM, OptionError, SamplingParams, cli
from streaming.prompt_file import FilePrompt, encode_prompts, read_prompt_file
from tests.streaming.byte_tokenizer import VOCAB_SIZE, write_byte_tokenizer

GOOD = '{"ids": [5, 9, 2]}\n{"ids": [1], "max_tokens": 2}\n{"ids": [33, 8]}\n'


def written(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_each_line_of_a_text_is_a_prompt(tmp_path: Path) -> None:
    path = written(tmp_path, "prompts.txt", "\ufeffThe sea is\r\n  einmal — war \n{1}\n\n")
    assert read_prompt_file(path) == [FilePrompt("The sea is"), FilePrompt("  einmal — war "), FilePrompt("{1}")]


def test_each_line_of_json_is_a_prompt_with_a_length_of_its_own(tmp_path: Path) -> None:
    path = written(tmp_path, "p.jsonl", '{"prompt": "a\\nb", "max_tokens": 7}\n{"ids": [1, 2]}\n{"prompt": "é"}')
    assert read_prompt_file(path) == [FilePrompt("a\nb", 7), FilePrompt([1, 2]), FilePrompt("é")]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.txt", "", "p.txt: the file is empty"),
        ("p.jsonl", " \n\n", "p.jsonl: the file is empty"),
        ("p.txt", "one\n\nthree", "p.txt, line 2: is empty, and a prompt is needed on every line"),
        ("p.txt", b"one\ntw\xff", "p.txt, line 2: is not UTF-8 text (invalid start byte)"),
        ("p.csv", "one", "p.csv: a .txt or .jsonl file is needed, and its name ends with '.csv'"),
        ("p", "one", "p: a .txt or .jsonl file is needed, and its name ends with ''"),
        ("p.jsonl", GOOD + '{"ids": [1}', "p.jsonl, line 4: is no JSON (Expecting ',' delimiter: line 1 column 11"),
        (
            "p.jsonl",
            GOOD + '{"ids": [' + "9" * 6000 + "]}",
            "line 4: holds a number of 6000 digits, which is neither a",
        ),
        ("p.jsonl", "[" * 100_000, "p.jsonl, line 1: is no JSON ("),
        ("p.jsonl", '"text"', 'p.jsonl, line 1: an object such as {"prompt": "..."} is needed, found "text"'),
        ("p.jsonl", '{"text": "a"}', "p.jsonl, line 1: 'text' is not one of prompt, ids, max_tokens"),
        ("p.jsonl", '{"max_tokens": 3}', 'line 1: one of prompt and ids is needed, found {"max_tokens": 3}'),
        ("p.jsonl", '{"prompt": "a", "ids": [1]}', "line 1: one of prompt and ids is needed, found"),
        ("p.jsonl", '{"prompt": ""}', "line 1: prompt is '': a text that is not empty is needed"),
        ("p.jsonl", '{"prompt": 5}', "line 1: prompt is 5: a text that is not empty is needed"),
        ("p.jsonl", '{"prompt": "a\\ud83d"}', "line 1: prompt holds half a character: 'a\\ud83d'"),
        ("p.jsonl", '{"ids": [1, 2.5]}', "line 1: ids is [1, 2.5]: a list of token ids is needed, such as [1, 2, 3]"),
        ("p.jsonl", '{"ids": []}', "line 1: ids is []: a list of token ids is needed"),
        ("p.jsonl", '{"ids": [true]}', "line 1: ids is [True]: a list of token ids is needed"),
        ("p.jsonl", '{"ids": [1], "max_tokens": 0}', "line 1: max_tokens is 0: a whole number of at least 1 is needed"),
        ("p.jsonl", '{"ids": [1], "max_tokens": "9"}', "line 1: max_tokens is '9': a whole number of at least 1"),
    ],
)
def test_what_is_wrong_is_said_with_file_line_and_what_was_found(
    name: str, text: str | bytes, words: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError) as caught:
        read_prompt_file(written(tmp_path, name, text))
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"--prompts {tmp_path}/{name}")
    assert len(str(caught.value)) < 400


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[[TinyModel], Path]) -> Path:
    return tiny_folder(TinyModel(layers=2, dtype="float32", seed=4))


def expected(folder: Path) -> list[list[int]]:
    with LLM(folder) as llm:
        params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (6, 2, 6)]
        return [list(answer.token_ids) for answer in llm.complete([[5, 9, 2], [1], [33, 8]], params)]


def test_the_answers_are_those_of_the_prompts_in_the_order_of_the_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "p.jsonl", GOOD)
    command = ["generate", str(folder), "--prompts", str(path), "--max-tokens", "6", "--ignore-eos"]
    assert cli.run([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    answers = expected(folder)
    assert [(one["index"], one["token_ids"]) for one in found["completions"]] == list(enumerate(answers))
    assert found["passes"] == 6
    assert found["tokens_per_pass"] == round(14 / 6, 4)
    assert cli.run([*command, "--quiet"]) == 0
    lines = [f"[{number}] {','.join(map(str, ids))}\n" for number, ids in enumerate(answers, start=1)]
    assert capsys.readouterr().out == "".join(lines)


def test_guesses_are_told_of(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "p.jsonl", GOOD)
    command = ["generate", str(folder), "--prompts", str(path), "--max-tokens", "40", "--ignore-eos"]
    assert cli.run([*command, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert cli.run([*command, "--json", "--speculate", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["completions"] == plain["completions"]
    assert found["proposed_tokens"] > 0
    assert cli.run([*command, "--speculate", "3"]) == 0
    right = f"{found['accepted_tokens']} of {found['proposed_tokens']} proposed tokens were right"
    assert right in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "a"], "--prompts FILE does not go with --prompt, --prompt-file or --ids"),
        (["--ids", "1"], "--prompts FILE does not go with --prompt, --prompt-file or --ids"),
        (["--chat"], "--chat takes text, and --prompts "),
        (["--speculate", "4", "--temperature", "0.5"], "speculate is 4 and temperature is 0.5"),
        (["--speculate", "65"], "speculate is 65: it must be an integer of at least 0 and at most 64"),
        (["--draft-model", "demo", "--temperature", "0.5"], "--draft-model demo does not go with --temperature 0.5"),
        (["--draft-model", "demo", "--speculate", "0"], "--draft-model demo guesses nothing with --speculate 0"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(
    arguments: list[str], words: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "p.jsonl", GOOD)
    assert cli.run(["generate", str(folder), "--prompts", str(path), *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert words in said.err
    assert said.err.count("\n") == 1


def test_a_file_that_is_not_there_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", str(folder), "--prompts", "nowhere.txt"]) == 2
    said = capsys.readouterr()
    assert said.err == "firstlayer generate: error: --prompts nowhere.txt: No such file or directory\n"


def test_a_folder_is_no_list_of_prompts(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.txt").mkdir()
    assert cli.run(["generate", str(folder), "--prompts", str(tmp_path / "p.txt")]) == 2
    assert f"--prompts {tmp_path}/p.txt: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"ids": [1, 160]}', "token id 160 is not in the vocabulary of 160 (0 to 159)"),
        ('{"ids": [-1]}', "token id -1 is not in the vocabulary of 160 (0 to 159)"),
        (json.dumps({"ids": [1] * 32}), "the prompt has 32 tokens, and the context holds 32 with the answer"),
    ],
)
def test_a_prompt_that_the_model_cannot_take_is_named_by_its_line(
    line: str, words: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "p.jsonl", GOOD + line + "\n")
    assert cli.run(["generate", str(folder), "--prompts", str(path), "--max-model-len", "32"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"firstlayer generate: error: --prompts {path}, line 4: {words}")
    assert said.err.count("\n") == 1


# --- texts ----------------------------------------------------------------------------------------------------------


def of_two(text: str) -> list[int]:
    """A token for every two characters."""
    return list(range((len(text) + 1) // 2))


def test_texts_become_ids_and_ids_stay() -> None:
    found = encode_prompts(["abcd", [7, 8], "x" * 18], Path("p.txt"), encode=of_two, context_length=10)
    assert found == [[0, 1], [7, 8], list(range(9))]


def test_a_text_that_the_context_does_not_hold_is_named_by_its_line() -> None:
    with pytest.raises(OptionError) as caught:
        encode_prompts(["ab", "x" * 20], Path("p.txt"), encode=of_two, context_length=10)
    assert str(caught.value).startswith("--prompts p.txt, line 2: the prompt has 10 tokens, and the context holds 10 ")
    with pytest.raises(OptionError, match=r"^--prompts p.txt, line 1: the prompt has no token: at least one"):
        encode_prompts(["ab"], Path("p.txt"), encode=lambda text: [], context_length=10)


def test_of_a_text_that_is_far_too_long_only_the_beginning_is_encoded() -> None:
    asked: list[int] = []

    def encode(text: str) -> list[int]:
        asked.append(len(text))
        return of_two(text)

    with pytest.raises(OptionError, match="line 1: the prompt has more than 20 tokens, and the context holds 10 with"):
        encode_prompts(["x" * 1_000_000], Path("p.txt"), encode=encode, context_length=10)
    assert asked == [160]


def test_a_long_text_of_few_tokens_is_not_refused_for_its_characters() -> None:
    found = encode_prompts([" " * 100_000], Path("p.txt"), encode=lambda text: [5], context_length=10)
    assert found == [[5]]


def test_texts_of_a_file_are_answered_as_each_alone_is_and_named_by_their_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_model(tmp_path / "model", model=TinyModel(layers=2, dtype="float32", vocab_size=VOCAB_SIZE))
    write_byte_tokenizer(folder)
    texts = ["The sea", "Größe 1984 — "]
    path = written(tmp_path, "p.txt", "\n".join(texts))
    command = ["generate", str(folder), "--max-tokens", "3", "--max-model-len", "20"]
    assert cli.run([*command, "--prompts", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["completions"]
    with LLM(folder) as llm:
        wanted = [llm.complete([text], SamplingParams(max_tokens=3))[0] for text in texts]
    assert [(one["token_ids"], one["text"]) for one in found] == [(list(one.token_ids), one.text) for one in wanted]
    written(tmp_path, "p.txt", "The sea\n" + "sea" * 7)
    assert cli.run([*command, "--prompts", str(path)]) == 2
    assert f"--prompts {path}, line 2: the prompt has 21 tokens, and the" in capsys.readouterr().err

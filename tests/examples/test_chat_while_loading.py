"""The asynchronous example: an answer on stdout, the layers' states on stderr."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from examples.chat_while_loading import main
from streaming import LLM, SamplingParams


def test_it_answers_with_the_models_own_tokens(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tiny), "--ids", "1,2,3", "--max-tokens", "5"])
    with LLM(tiny) as llm:
        (expected,) = llm.complete([[1, 2, 3]], SamplingParams(max_tokens=5))
    assert capsys.readouterr().out.split() == [str(token) for token in expected.token_ids]


def test_the_bar_ends_with_every_layer_ready_and_never_loses_one(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(tiny), "--ids", "1,2,3", "--max-tokens", "200"])  # long enough that the load ends first
    bars = capsys.readouterr().err.split()
    assert bars[-1] == "[#####]"  # table, three layers, head
    ready = [bar.count("#") for bar in bars]
    assert ready == sorted(ready)
    assert len(set(bars)) == len(bars)


@pytest.mark.slow
def test_a_question_is_read_from_stdin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("What is the sea?\n"))
    main(["--max-tokens", "8"])
    assert "sea" in capsys.readouterr().out

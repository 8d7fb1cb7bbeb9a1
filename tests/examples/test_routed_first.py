"""The example of routed_first prints what was read before the first token, and what chance would give."""

from __future__ import annotations

import re
import warnings
from importlib import import_module
from pathlib import Path

import pytest

from examples.routed_first import main, touched
from tests.test_against_transformers import write_checkpoint

MANY = {
    "num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "hidden_size": 32, "head_dim": 16,
    "num_hidden_layers": 2, "vocab_size": 160,
}  # fmt: skip


def test_the_table_has_both_orders_and_both_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_checkpoint(import_module("transformers"), "qwen3_moe", MANY, folder=tmp_path)
    main([str(tmp_path), "--tokens", "4"])
    head, whole, routed, shares = capsys.readouterr().out.splitlines()
    assert head == "4 tokens, 2 of 32 experts each"
    assert whole.startswith("layers ")
    assert routed.startswith("routed_first ")
    found = re.fullmatch(r"share of the experts' bytes (0\.\d+); of uniform choices 0\.228", shares)
    assert found is not None
    assert 2 / 32 <= float(found[1]) <= 8 / 32  # between tokens that all agree, and tokens that never do


def test_of_as_many_choices_as_there_are_experts_about_two_thirds_are_touched() -> None:
    assert round(touched(tokens=16, chosen=8, experts=128), 4) == 0.6439
    assert touched(tokens=1, chosen=3, experts=4) == 0.75

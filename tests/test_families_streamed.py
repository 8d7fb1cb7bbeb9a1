"""Every family beyond Llama's form, as transformers writes it: streamed in it is the resident model, bit for bit."""

from __future__ import annotations

import itertools
import warnings
from importlib import import_module
from pathlib import Path

import pytest

from quant.registry import scheme_names
from tests.layers.family_cases import FAMILY_CASES
from tests.streaming.test_streamed_equals_eager import DEFAULT, SMALLEST, Case, differences
from tests.test_against_transformers import write_checkpoint

TURNS = itertools.cycle(itertools.product(("bfloat16", "float32"), (SMALLEST, DEFAULT), ("process", "threads")))
CASES = [
    (name, Case(FAMILY_CASES[name][0], scheme, window, reader, dtype))
    for (name, scheme), (dtype, window, reader) in zip(
        zip(FAMILY_CASES, itertools.cycle(("none", *scheme_names())), strict=False), TURNS, strict=False
    )
]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name}-{case}" for name, case in CASES])
def test_streamed_equals_eager(name: str, case: Case, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = import_module("transformers")
        transformers.logging.set_verbosity_error()
        model_type, changes = FAMILY_CASES[name]
        write_checkpoint(transformers, model_type, {**changes, "vocab_size": 160}, folder=tmp_path)
    assert differences(tmp_path, case) == []

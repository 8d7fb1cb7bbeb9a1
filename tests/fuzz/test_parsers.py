"""Broken files of every kind end in words: bytes changed, cut, doubled and put in, by hypothesis.

The same targets run under a coverage-guided fuzzer with `python -m tests.fuzz.guided` (see there).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.parsers import PARSERS, run_target

SETTINGS = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
Edit = tuple[str, float, bytes]
EDITS = st.lists(
    st.tuples(st.sampled_from(["cut", "set", "insert", "repeat"]), st.floats(0, 1), st.binary(min_size=1, max_size=9)),
    min_size=1,
    max_size=6,
)


def edited(content: bytes, edits: list[Edit]) -> bytes:
    """The content after some edits; a place is a share of the length."""
    for kind, place, new in edits:
        at = int(place * len(content))
        if kind == "cut":
            content = content[:at]
        elif kind == "set":
            content = content[:at] + new + content[at + len(new) :]
        elif kind == "insert":
            content = content[:at] + new + content[at:]
        else:
            content = content[:at] + content[: len(new) * 8] + content[at:]
    return content


@pytest.mark.parametrize("name", PARSERS)
def test_the_files_to_begin_from_are_whole(name: str, tmp_path: Path) -> None:
    parser = PARSERS[name]
    for seed in parser.seeds:
        path = tmp_path / f"whole{parser.suffix}"
        path.write_bytes(seed)
        if name != "gguf":  # the smallest GGUF header is whole, but no whole model
            parser.read(path)


@pytest.mark.parametrize("name", PARSERS)
@given(edits=EDITS)
@SETTINGS
def test_an_edited_file_ends_in_words(name: str, edits: list[Edit], tmp_path: Path) -> None:
    for seed in PARSERS[name].seeds:
        run_target(PARSERS[name], edited(seed, edits), tmp_path)


@pytest.mark.parametrize("name", PARSERS)
@given(content=st.binary(max_size=300))
@SETTINGS
def test_random_bytes_end_in_words(name: str, content: bytes, tmp_path: Path) -> None:
    run_target(PARSERS[name], content, tmp_path)
    run_target(PARSERS[name], PARSERS[name].seeds[0][:24] + content, tmp_path)


@pytest.mark.parametrize("name", PARSERS)
def test_a_file_cut_anywhere_ends_in_words(name: str, tmp_path: Path) -> None:
    for seed in PARSERS[name].seeds:
        for length in range(0, len(seed), 1 + len(seed) // 1000):
            run_target(PARSERS[name], seed[:length], tmp_path)

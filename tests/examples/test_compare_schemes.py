"""The comparison has a line for each scheme, with the sizes that the plan knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.compare_schemes import HEAD, main, row
from quant.registry import scheme_names
from streaming import Summary


def test_a_line_for_each_scheme(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tiny), "--ids", "1,2,3", "--max-tokens", "6"])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == HEAD
    assert [line.split()[0] for line in lines] == list(scheme_names())
    wide = lines[0].split()
    parameters = 160 * 64 * 2 + 64 + 3 * (128 * 64 + 64 * 64 + 3 * 96 * 64 + 2 * 64)
    assert wide[1] == f"{2 * parameters / 1024:.1f}"
    assert lines[0].split()[8] == "6"  # all tokens agree with themselves


def test_a_line_holds_what_was_measured() -> None:
    found = Summary(bytes_kept=3 << 20, load_s=0.5, from_load_s=0.25, decode_tok_s=12.34, token_ids=[7, 8, 9])
    assert row("int8_per_channel", found, 2).split() == [
        "int8_per_channel", "3.0", "MiB", "0.500", "s", "0.250", "s", "12.3", "2", "7,8,9",
    ]  # fmt: skip

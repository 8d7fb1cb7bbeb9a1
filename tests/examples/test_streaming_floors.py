"""The table of what a token costs under a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.streaming_floors import least_recently_used_hits, main
from examples.write_tiny_model import TinyModel, write_tiny_model
from tests.streaming.limits import limit_of


def test_a_walk_that_begins_anew_hits_nothing_that_was_forgotten_by_age() -> None:
    assert least_recently_used_hits([10] * 8, room_nbytes=70) == 0.0
    assert least_recently_used_hits([10] * 8, room_nbytes=80) == 1.0
    assert least_recently_used_hits([30, 10, 10], room_nbytes=49) == 0.0


def test_a_row_for_each_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny_model(tmp_path / "model", model=TinyModel(layers=6))
    limits = [limit_of(folder, share) for share in (0.0, 0.3)]
    assert main([str(folder), "--memory", f"{limits[0]},{limits[1]},1GiB", "--bandwidth", "1MB"]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == [str(limits[0]), str(limits[1]), "1GiB"]
    assert int(rows[0][3].rstrip("%")) < int(rows[1][3].rstrip("%")) < 100
    assert [row[4] for row in rows[:2]] == ["0%", "0%"]
    assert rows[2][2:4] == ["100%", "100%"]
    assert main([str(folder), "--memory", "1KiB"]) == 1
    assert "is too small even to stream" in capsys.readouterr().err

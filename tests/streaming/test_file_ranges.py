"""A few bytes of a file on demand: whole, whatever the system gives at once."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples.write_tiny_model import TinyModel, write_tiny_model
from quant.dtypes import DType
from streaming.embedding_rows import EmbeddingRows
from streaming.errors import CheckpointError, LayerLoadError
from streaming.file_ranges import open_ranges
from streaming.open_files import state_of
from streaming.options import LoadOptions
from streaming.prepare import prepare


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(256)) * 4)
    return path


def test_ranges_are_given_in_the_order_in_which_they_were_asked_for(file: Path) -> None:
    with closing(open_ranges(file)) as ranges:
        assert ranges.read([(256, 3), (0, 2), (7, 0)]) == [b"\x00\x01\x02", b"\x00\x01", b""]


def test_a_range_that_the_system_gives_in_parts_is_read_to_its_end(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux gives at most 2 GiB at once, and a table whose rows are no runs of bytes is read as one range."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, offset: preadv(fd, [into[0][:100]], offset))
    with closing(open_ranges(file)) as ranges:
        assert ranges.read([(10, 700)]) == [(bytes(range(256)) * 4)[10:710]]


def test_a_file_that_ends_too_early_is_named(file: Path) -> None:
    with closing(open_ranges(file)) as ranges, pytest.raises(CheckpointError) as caught:
        ranges.read([(1000, 100)])
    assert str(caught.value) == f"{file}: ended before its byte 1,100"


def test_the_systems_limit_of_open_files_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any) -> int:
        raise OSError(24, os.strerror(24))

    monkeypatch.setattr(os, "open", none_left)
    with pytest.raises(CheckpointError, match=r"too many open files: .*ulimit -n"):
        open_ranges(file)


def test_a_file_that_is_not_what_was_planned_is_named(file: Path) -> None:
    with closing(open_ranges(file, state=state_of(file.stat()))) as ranges:
        assert ranges.read([(1, 1)]) == [b"\x01"]
        os.utime(file, ns=(1, 1))
        with pytest.raises(CheckpointError, match="was changed, or replaced, during the load") as caught:
            ranges.read([(1, 1)])
    assert str(file) in str(caught.value)


def test_the_prompts_rows_are_those_of_the_file_that_was_planned(tmp_path: Path) -> None:
    """They are read long before the table: another file in its place would give the first token of another model."""
    prepared = prepare(str(write_tiny_model(tmp_path / "model", model=TinyModel(layers=1))), LoadOptions())
    table = prepared.plan.table
    assert isinstance(table.file, Path)
    os.replace(Path(shutil.copy(table.file, tmp_path / "other")), table.file)
    with (
        closing(EmbeddingRows(table, dtype=DType.BF16, state=prepared.read_plan.state_of(table.file))) as rows,
        pytest.raises(LayerLoadError, match="was changed, or replaced, during the load"),
    ):
        rows.fetch([3])


def test_rows_of_ever_new_tokens_do_not_become_the_whole_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path / "model", model=TinyModel(layers=1))
    table = prepare(str(folder), LoadOptions()).plan.table
    monkeypatch.setattr("streaming.embedding_rows.KEPT_NBYTES", 10 * table.row_nbytes)
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    (whole,) = (tensors[table.name] for tensors in files if table.name in tensors)
    with closing(EmbeddingRows(table, dtype=DType.BF16)) as rows:
        assert torch.equal(rows.fetch([3, 5, 3]), whole[[3, 5, 3]])
        assert rows.read_nbytes == 2 * table.row_nbytes
        rows.fetch([5, 3])
        assert rows.read_nbytes == 2 * table.row_nbytes
        for first in range(0, 150, 6):
            ids = list(range(first, first + 6))
            assert torch.equal(rows.fetch(ids), whole[ids])
            assert len(rows._rows) <= 10
        many = list(range(40))
        assert torch.equal(rows.fetch(many), whole[many])  # more than are kept

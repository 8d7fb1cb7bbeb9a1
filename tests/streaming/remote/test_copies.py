"""Copies that are kept while a remote model is read: whole or not there, and never of another version."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest
import torch

from streaming import LLM, LayerLoadError
from streaming.checkpoint import open_checkpoint
from streaming.checkpoint.remote_file import RemoteFile
from streaming.options import LoadOptions
from streaming.prepare import prepare
from streaming.reading_records import RECORD
from streaming.remote.copies import Copies, PartialCopy
from streaming.remote.ranges import RangeFetcher
from streaming.remote.reading import IN_WORDS, Piece, RunFiller
from streaming.sharded_writer import source_digest
from tests.streaming.remote.range_server import RangeServer
from tests.streaming.remote.remote_model import FIRST, HASTY, SECOND, logits, on_weights


def test_a_copy_is_kept_and_the_next_load_reads_it(
    server: RangeServer, expected: torch.Tensor, folder: Path, tmp_path: Path
) -> None:
    copies = tmp_path / "copies"
    assert torch.equal(logits(server.url, remote_cache=str(copies)), expected)
    for name in (FIRST, SECOND):
        assert [path.read_bytes() for path in copies.rglob(name)] == [(folder / name).read_bytes()]
    assert not list(copies.rglob("*.partial"))
    server.faults = [on_weights(lambda handler: handler.reply(404))]
    assert torch.equal(logits(server.url, remote_cache=str(copies)), expected)


def test_a_copy_of_another_version_is_not_read(server: RangeServer, folder: Path, tmp_path: Path) -> None:
    copies = str(tmp_path / "copies")
    before = logits(server.url, remote_cache=copies)
    data = bytearray((folder / FIRST).read_bytes())
    data[-64:] = bytes(64)
    (folder / FIRST).write_bytes(data)
    assert isinstance(open_checkpoint(server.url, remote_cache=copies).files[0], RemoteFile)
    after = logits(server.url, remote_cache=copies)
    assert not torch.equal(after, before)
    assert torch.equal(after, logits(str(folder)))


@pytest.mark.usefixtures("hasty")
def test_a_load_that_fails_leaves_no_copy(server: RangeServer, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    server.faults = [on_weights(lambda handler: handler.reply(503) if SECOND in handler.path else handler.answer())]
    with pytest.raises(LayerLoadError):
        logits(server.url, remote_cache=str(copies))
    assert not [path for path in copies.rglob("*") if path.is_file()]


def test_a_layer_alone_brings_no_other_bytes_and_keeps_no_copy(server: RangeServer, tmp_path: Path) -> None:
    """A copy would be finished at the end: the whole model for the sake of one layer."""
    copies = tmp_path / "copies"
    LLM.load_layer(server.url, 0, remote_cache=str(copies))
    assert not [path for path in copies.rglob("*") if path.is_file()]


def test_shards_of_another_version_of_a_remote_model_are_not_taken_for_the_same(
    server: RangeServer, folder: Path
) -> None:
    def digest() -> str:
        return source_digest(prepare(server.url, LoadOptions()))

    before = digest()
    assert digest() == before
    data = bytearray((folder / FIRST).read_bytes())
    data[-64:] = bytes(64)
    (folder / FIRST).write_bytes(data)
    assert digest() != before


def test_a_copy_of_the_wrong_size_is_not_read(server: RangeServer, expected: torch.Tensor, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    logits(server.url, remote_cache=str(copies))
    (half,) = copies.rglob(FIRST)
    os.truncate(half, 1000)
    assert torch.equal(logits(server.url, remote_cache=str(copies)), expected)
    assert half.stat().st_size > 1000


def test_a_copy_that_cannot_be_written_costs_a_warning_and_not_the_load(
    server: RangeServer, expected: torch.Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert torch.equal(logits(server.url, remote_cache=str(tmp_path / "file" / "folder")), expected)
    assert "no copy is kept (Not a directory)" in caplog.text


def test_a_full_disk_costs_the_copy_and_not_the_load(
    server: RangeServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PartialCopy, "write", full)
    data = (folder / FIRST).read_bytes()
    mark = server.marks(data)["ETag"]
    file = RemoteFile(f"{server.url}{FIRST}", len(data), mark, copy_to=tmp_path / "copies" / FIRST)
    said: list[dict[str, object]] = []
    memory = os.memfd_create("test")
    os.ftruncate(memory, 100)
    with closing(RangeFetcher(policy=HASTY)) as fetcher:
        copies = Copies([file], "token", said.append)
        filler = RunFiller([file], [memory], fetcher, copies, lambda record: None, said.append)
        assert filler.fill([Piece(0, 0, 500, 60, 0, 40, 0), Piece(1, 0, 570, 40, 0, 0, 0)])
        copies.finish([file], fetcher)
    assert os.pread(memory, 100, 0) == data[570:610] + data[500:560]
    assert said == [
        {"warning": f"{file.copy_to}: no copy is kept (No space left on device); the load goes on without it"}
    ]
    assert not list((tmp_path / "copies").iterdir())
    os.close(memory)


def test_a_fault_that_nobody_foresaw_is_told_in_words(tmp_path: Path) -> None:
    """A thread that ends without a word would leave whoever waits for its piece waiting."""

    class Broken:
        def fetch(self, *_: object) -> None:
            raise ValueError("nobody thought of this")

    said: list[dict[str, object]] = []
    reported: list[bytes] = []
    file = RemoteFile("http://host/model.safetensors", 1000)
    copies = Copies([file], "token", said.append)
    filler = RunFiller([file], [-1], Broken(), copies, reported.append, said.append)  # type: ignore[arg-type]
    assert not filler.fill([Piece(3, 0, 500, 60, 0, 40, 0)])
    assert said == [{"piece": 3, "words": "ValueError: nobody thought of this"}]
    assert [RECORD.unpack(record)[:2] for record in reported] == [(3, IN_WORDS)]

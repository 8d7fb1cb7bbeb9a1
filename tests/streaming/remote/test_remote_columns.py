"""A rank's columns of a remote file are the slices of its bytes, in whatever chunks they come."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from streaming.checkpoint.remote_file import RemoteFile
from streaming.reading_records import RECORD
from streaming.remote.copies import Copies
from streaming.remote.ranges import RangeFetcher
from streaming.remote.reader import RemoteReader
from streaming.remote.reading import Piece as RemotePiece
from streaming.remote.reading import RunFiller
from tests.streaming.remote.range_server import serving
from tests.streaming.remote.remote_model import HASTY
from tests.streaming.strided import NBYTES, assert_reads, planned, sliced


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random bytes."""
    path = tmp_path_factory.mktemp("strided") / "model.safetensors"
    path.write_bytes(random.Random(5).randbytes(NBYTES))
    return path


def test_an_address_gives_the_slices_of_the_file(file: Path) -> None:
    with serving(file.parent) as server:
        data = file.read_bytes()
        plan = planned([RemoteFile(f"{server.url}{file.name}", NBYTES, server.marks(data)["ETag"])])
        assert_reads(RemoteReader(plan, policy=HASTY), plan, data)


def test_a_local_file_of_a_remote_plan_gives_its_slices(file: Path) -> None:
    plan = planned([file])
    assert_reads(RemoteReader(plan), plan, file.read_bytes())


@pytest.mark.parametrize("chunk", [1, 37, 100, 999, 5000])
def test_bytes_that_come_from_an_address_in_chunks_of_any_size_are_cut_alike(file: Path, chunk: int) -> None:
    data = file.read_bytes()

    class InChunks:
        def fetch(self, _: RemoteFile, start: int, stop: int, take: Callable[[memoryview], None]) -> None:
            for at in range(start, stop, chunk):
                take(memoryview(data)[at : min(stop, at + chunk)])

    remote = RemoteFile("http://host/model.safetensors", NBYTES)
    memory = os.memfd_create("test")
    records: list[bytes] = []
    try:
        fetcher: RangeFetcher = InChunks()  # type: ignore[assignment]
        copies = Copies([remote], "token", lambda line: None)
        filler = RunFiller([remote], [memory], fetcher, copies, records.append, lambda line: None)
        pieces = [RemotePiece(0, 0, 300, 500, 0, 0, 0, 100, 400), RemotePiece(1, 0, 2050, 70, 0, 500, 0)]
        assert filler.fill(pieces)
        assert os.pread(memory, 1000, 0) == sliced(data, 100, 400, 5, 300) + data[2050:2120]
    finally:
        os.close(memory)
    assert [RECORD.unpack(record)[:2] for record in records] == [(0, 0), (1, 0)]

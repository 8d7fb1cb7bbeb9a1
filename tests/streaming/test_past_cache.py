"""Reads past the page cache: the same bytes from anywhere to anywhere."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from examples.write_tiny_model import TinyModel
from streaming import LLM
from streaming.open_files import CHANGED, OpenFiles, state_of
from streaming.page_cache import O_DIRECT
from streaming.past_cache import BLOCK, PastCache
from streaming.reading import SHORT, FlatPiece
from tests.streaming.limits import limit_of

SIZE = 5 * BLOCK + 1234


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "bytes"
    path.write_bytes(random.Random(0).randbytes(SIZE))
    return path


def opened(path: Path) -> PastCache:
    return PastCache(OpenFiles([str(path)], [state_of(path.stat())], [1 << 20], flags=O_DIRECT))


def piece(offset: int, nbytes: int, dest: int) -> FlatPiece:
    return FlatPiece(0, offset, nbytes, 0, dest, 0)


def test_any_run_of_bytes_comes_to_any_place(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streaming.past_cache.BUFFER_NBYTES", 2 * BLOCK)  # several reads for most
    whole, chance = file.read_bytes(), random.Random(1)
    with closing(opened(file)) as past:
        for _ in range(200):
            first, last = sorted(chance.choices(range(SIZE + 1), k=2))
            dest = chance.randrange(200)
            raw = torch.zeros(last - first + dest + 7, dtype=torch.uint8)
            if last > first and past.fill(piece(first, last - first, dest), raw) is None:
                pytest.skip("this file system knows no reads past the cache")
            assert bytes(raw[dest : dest + last - first].tolist()) == whole[first:last]
            assert not raw[:dest].any()
            assert not raw[dest + last - first :].any()


def test_a_file_that_ends_too_early_or_changes_is_told(file: Path) -> None:
    with closing(opened(file)) as past:
        raw = torch.zeros(SIZE + BLOCK, dtype=torch.uint8)
        if past.fill(piece(SIZE - 10, 11, 0), raw) is None:
            pytest.skip("this file system knows no reads past the cache")
        assert past.fill(piece(SIZE - 10, 11, 0), raw) == SHORT
        assert past.fill(piece(SIZE - 10, 10, 0), raw) == 0
        os.utime(file, ns=(1, 1))
        assert past.fill(piece(0, 10, 0), raw) == CHANGED


def test_where_a_file_system_refuses_the_cache_is_used(
    tiny_folder: Callable[[TinyModel], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plain = tiny_folder(TinyModel(layers=4)), os.open
    monkeypatch.setattr("streaming.open_stream.exceeds_memory", lambda plan, available: True)
    monkeypatch.setattr("streaming.item_bytes.is_cached", lambda descriptor, offset, nbytes: False)
    refused: list[object] = []

    def refusing(path: object, flags: int, *more: object, **named: object) -> int:
        if flags & O_DIRECT:
            refused.append(path)
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(path, flags, *more, **named)  # type: ignore[arg-type]

    limit, ids = limit_of(folder, 0.0, max_model_len=64), [5, 9, 2, 7]
    with LLM(folder, max_model_len=64) as llm:
        expected = llm.logits(ids)
    with LLM(folder, memory=limit, max_model_len=64) as llm:  # past the cache, where this one does not
        assert torch.equal(llm.logits(ids), expected)
        assert torch.equal(llm.logits(ids), expected)
    monkeypatch.setattr(os, "open", refusing)
    with LLM(folder, memory=limit, max_model_len=64) as llm:
        assert torch.equal(llm.logits(ids), expected)
    assert refused

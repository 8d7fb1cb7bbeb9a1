"""A server of a tiny model for each test, and the logits of the same files read locally."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from streaming import LLM
from streaming.prepare import Prepared
from streaming.reader import Reader
from streaming.remote.reader import RemoteReader
from tests.streaming.remote.range_server import RangeServer, serving
from tests.streaming.remote.remote_model import HASTY, IDS, PROXY_VARIABLES


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small files are kept in the test's own folder."""
    monkeypatch.setenv("FIRSTLAYER_CACHE", str(tmp_path / "cache"))
    for name in ("FIRSTLAYER_HTTP_AUTHORIZATION", *PROXY_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def folder(four_layers: Path, tmp_path: Path) -> Path:
    """A model of two files that a test may spoil."""
    return Path(shutil.copytree(four_layers, tmp_path / "model"))


@pytest.fixture
def server(folder: Path) -> Iterator[RangeServer]:
    """A server of that model."""
    with serving(folder) as found:
        yield found


@pytest.fixture(scope="module")
def expected(four_layers: Path) -> torch.Tensor:
    """The logits of the same files, read locally."""
    with LLM(four_layers) as llm:
        found: torch.Tensor = llm.logits(IDS)
        return found


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that have little patience."""

    def reader_of(prepared: Prepared) -> Reader:
        return RemoteReader(prepared.read_plan, policy=HASTY)

    monkeypatch.setattr("streaming.llm.start_reader", reader_of)

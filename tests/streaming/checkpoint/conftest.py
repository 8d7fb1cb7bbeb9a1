"""The hub's cache and a server in the hub's place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from tests.streaming.checkpoint.build import CONFIG
from tests.streaming.checkpoint.hub_server import Hub, serve

SMALL = {"config.json": json.dumps(CONFIG).encode(), "tokenizer.json": b"{}"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty server, and the network allowed."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "FIRSTLAYER_USE_MODELSCOPE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # read once, when it was imported
    with serve(Hub()) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub

"""A tiny checkpoint for the examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.write_tiny_model import TinyModel, write_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of random numbers, without a tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", model=TinyModel(layers=3))

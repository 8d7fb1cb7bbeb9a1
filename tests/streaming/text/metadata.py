"""GGUF metadata made by hand, and checkpoints that have nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streaming.checkpoint.tensors import Checkpoint

# In the order of their scores: the first is merged first.
_PIECES = ["▁t", "he", "▁the", "▁s", "ea", "▁sea", "in", "▁▁", "ing", "s▁", "▁is", "th"]
_CHARACTERS = "▁etaoinshrdlu.é"


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """A GGUF's metadata of the kind "llama": 3 special tokens, 256 bytes, pieces, characters, a user-defined token."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES, *_CHARACTERS, "<|user|>"]
    ranked = len(_PIECES) + len(_CHARACTERS)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(ranked)] + [-1000.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * ranked + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }


def gguf_checkpoint(metadata: Mapping[str, Any]) -> Checkpoint:
    """A checkpoint that has nothing but metadata."""
    return Checkpoint(Path("model.gguf"), "gguf", tensors={}, files=(), config={}, metadata=metadata)

"""What a model can be asked."""

from __future__ import annotations

from collections.abc import Sequence

Prompt = str | Sequence[int]
"""A text, or token ids."""

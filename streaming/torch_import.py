"""The one place where torch is imported for the first time."""

from __future__ import annotations


def import_torch() -> None:
    """Import torch."""
    import torch  # noqa: F401

"""Byte counts in words: "12GiB", "512MB", "1_000_000", and back."""

from __future__ import annotations

import re
from math import ceil

from streaming.errors import OptionError

_UNITS = {
    "": 1, "b": 1,
    "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_LONGEST = 24  # digits


def parse_size(text: str | int, *, option: str) -> int:
    """Bytes of "12GiB", "1.5g", "800MB" or a plain number; an OptionError names the option otherwise."""
    value = text if isinstance(text, int) and not isinstance(text, bool) else _parsed(text)
    if value is None:
        raise OptionError(f"{option} {text!r}: a size such as 512MiB or 12GiB is needed")
    if value < 1:
        raise OptionError(f"{option} {text!r}: must be more than 0 bytes")
    return value


def _parsed(text: object) -> int | None:
    """Bytes of a size in words; None for what is none, or is beyond any machine's."""
    found = re.fullmatch(r"\s*(\d[\d_]*(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text) if isinstance(text, str) else None
    if not found or found[2].lower() not in _UNITS or len(found[1]) > _LONGEST:
        return None
    return int(float(found[1].replace("_", "")) * _UNITS[found[2].lower()])


def format_size(nbytes: float) -> str:
    """A byte count for people: "512 B", "1.5 MiB", "12.0 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024 or unit == "GiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable")


def format_needed(nbytes: float) -> str:
    """The same for what is needed at the least: rounded up, so that who grants it grants enough."""
    for unit, size in (("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)):
        if abs(nbytes) < 1024 * size or unit == "GiB":
            return f"{ceil(nbytes)} B" if unit == "B" else f"{ceil(nbytes * 10 / size) / 10:.1f} {unit}"
    raise AssertionError("unreachable")

"""Byte counts in words: "12GiB", "512MB", "1_000_000", and back."""

from __future__ import annotations

import re

from streaming.errors import OptionError

_UNITS = {
    "": 1, "b": 1,
    "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip


def parse_size(text: str | int, *, option: str) -> int:
    """Bytes of "12GiB", "1.5g", "800MB" or a plain number; an OptionError names the option otherwise."""
    if isinstance(text, bool):
        raise OptionError(f"{option} {text!r}: a size such as 512MiB or 12GiB is needed")
    if isinstance(text, int):
        value: float = text
    else:
        found = re.fullmatch(r"\s*([0-9_]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
        if not found or found[2].lower() not in _UNITS:
            raise OptionError(f"{option} {text!r}: a size such as 512MiB or 12GiB is needed")
        value = float(found[1].replace("_", "")) * _UNITS[found[2].lower()]
    if value <= 0:
        raise OptionError(f"{option} {text!r}: must be more than 0 bytes")
    return int(value)


def format_size(nbytes: float) -> str:
    """A byte count for people: "512 B", "1.5 MiB", "12.0 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024 or unit == "GiB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("unreachable")

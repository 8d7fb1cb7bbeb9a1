"""The program that makes weights up in a process of its own, in place of reading files: run by `dummy.py`. [no-torch]

It speaks as `reading.py` does: one job on standard input, then counts of released window items; a RECORD for each piece
on standard output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streaming.dummy_pattern import fill_shared_patterns
from streaming.reading import Carrier, FlatPiece, PieceReader, Works, serve


def main() -> None:
    """Carry out one job from standard input: make numbers up."""
    serve(_carrier_of)


def _carrier_of(job: Mapping[str, Any], report: Callable[[bytes], None]) -> tuple[Carrier, Works]:
    pieces = [FlatPiece(*piece) for piece in job["pieces"]]
    fill = fill_shared_patterns(job["patterns"], job["regions"])
    reader = PieceReader(pieces, range(len(job["patterns"])), fill, report)
    return reader, [reader.run] * job["threads"]

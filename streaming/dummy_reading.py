"""The program that makes weights up in a process of its own, in place of reading files: run by `dummy.py`. [no-torch]

It speaks as `reading.py` does: one job on standard input, then counts of released window items; a RECORD for each piece
on standard output.
"""

from __future__ import annotations

import json
import os
import sys
import threading

from streaming.dummy_pattern import fill_shared_patterns
from streaming.reading import COUNT, PieceReader


def main() -> None:
    """Carry out one job from standard input; its end means: stop."""
    job = json.loads(sys.stdin.buffer.readline())
    pieces = [tuple(piece) for piece in job["pieces"]]
    lock = threading.Lock()

    def report(record: bytes) -> None:
        with lock:
            try:
                os.write(1, record)
            except OSError:  # nobody listens any more
                os._exit(0)

    fill = fill_shared_patterns(job["patterns"], job["regions"])
    reader = PieceReader(pieces, range(len(job["patterns"])), fill, report)
    for _ in range(job["threads"]):
        threading.Thread(target=reader.run, daemon=True).start()
    while len(count := sys.stdin.buffer.read(COUNT.size)) == COUNT.size:
        reader.release(COUNT.unpack(count)[0])
    os._exit(0)

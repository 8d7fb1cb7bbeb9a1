"""A program for tests: it imports torch once, and starts a process that puts units for each line that it is told.

Told "ROOT FIRST", the process says "began 1" where it may write, then "put N" when unit N has been put, from FIRST on,
until it is killed; then "ended 0" is said. "pid N" comes before all.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from streaming.stored_cache import data_file
from tests.streaming.stored_cache.units import Opened, unit_of

MOST_NBYTES = 400_000


def write_on(root: Path, first: int) -> None:
    """Put units without end."""
    data_file.PIECE_NBYTES = 4096  # many moments within a unit
    torch.set_num_threads(1)  # the pool of threads did not come along with the fork
    opened = Opened(root)
    with opened as cache:
        say("began", int(cache.is_writing))
        number = first
        while True:
            cache.put(f"u{number}", unit_of(number, most=MOST_NBYTES))
            say("put", number)
            number += 1


def say(word: str, number: int) -> None:
    """One line, whole even where the process is killed just now."""
    os.write(1, f"{word} {number}\n".encode())


def main() -> None:
    """One process at a time."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        root, first = line.rstrip("\n").rsplit(" ", 1)
        go, gone = os.pipe()
        child = os.fork()
        if not child:
            os.read(go, 1)  # its number comes first
            write_on(Path(root), int(first))
        say("pid", child)
        os.write(gone, b"x")
        os.close(go)
        os.close(gone)
        os.waitpid(child, 0)
        say("ended", 0)


if __name__ == "__main__":
    main()

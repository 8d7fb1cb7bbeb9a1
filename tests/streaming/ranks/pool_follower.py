"""A follower of the pool: torch is imported once, then it serves one run after the other.

It writes an empty line to stdout whenever it is free, and reads what to join: "HOST PORT RANK TOKEN". It ends with its
stdin, and (as any follower) with a run that fails.
"""

from __future__ import annotations

import os
import sys
from functools import partial

import streaming.ranks.serve  # noqa: F401  (what takes long to import)
from streaming.ranks.follower import follow
from streaming.ranks.spoke import connect

_JOIN_S = 30.0


def main() -> None:
    """Serve until stdin ends."""
    while True:
        print(flush=True)  # noqa: T201  (the pool waits for it)
        if not (line := sys.stdin.readline()):
            os._exit(0)  # nothing is open, and taking torch down takes long
        host, port, rank, token = line.split()
        follow(int(rank), partial(connect, host, int(port), rank=int(rank), token=token, timeout_s=_JOIN_S))


if __name__ == "__main__":
    main()

"""A follower that does, in its first step, what the first word of its command line says: raises, or hangs."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial

from streaming.hooks import Hooks
from streaming.ranks.follower import follow, open_and_serve
from streaming.ranks.launch import TOKEN
from streaming.ranks.spoke import connect


def main(how: str, host: str, port: str, rank: str) -> int:
    """Follow until the first layer's output is there."""

    def fail(layer: str, hidden: object) -> None:
        if how == "raises":
            raise ArithmeticError(f"no more numbers in {layer}")
        threading.Event().wait()

    def serve(*given: object) -> None:
        from streaming.ranks.serve import serve as serve_well  # torch is there only now

        serve_well(*given, hooks=Hooks(layer_outputs=fail))  # type: ignore[arg-type]

    work = partial(open_and_serve, serve=serve)
    join = partial(connect, host, int(port), rank=int(rank), token=os.environ[TOKEN], timeout_s=30)
    return follow(int(rank), join, work=work)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

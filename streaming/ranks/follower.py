"""A follower: joins rank 0, opens its own part of the model, and serves until the run is over. [no-torch]

    python -m streaming.ranks.follower HOST PORT RANK

is how rank 0 starts one. Under torchrun the command line itself becomes one in every process but the first.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from streaming.cli import set_up_logging
from streaming.errors import RankError
from streaming.ranks.channel import Message, Progress
from streaming.ranks.launch import TOKEN, rank_options
from streaming.ranks.open_message import OPEN, opened
from streaming.ranks.spoke import RunInterruptedError, Spoke, connect, say
from streaming.ranks.torchrun import Launched

if TYPE_CHECKING:
    from streaming.prepare import Prepared
    from streaming.reader import Reader

Serve = Callable[["Prepared", "Reader", Spoke], None]
"""What a follower does with a load that has begun, torch being imported: it loads its layers and runs the steps that
rank 0 sends, until `spoke.closing`."""
Work = Callable[[Spoke, Message], None]
"""What a follower does with the message "open"."""

_JOIN_S = 60.0  # for rank 0 to answer; it listens before it starts anybody


def main(arguments: Sequence[str]) -> int:
    """Be a follower that rank 0 has started; the exit status."""
    host, port, rank = arguments
    set_up_logging()
    spoke = partial(connect, host, int(port), rank=int(rank), token=os.environ.pop(TOKEN, ""), timeout_s=_JOIN_S)
    return follow(int(rank), spoke)


def follow_launched(launched: Launched, *, timeout_s: float) -> int:
    """Be a follower that torchrun has started; rank 0 may come to listen up to `timeout_s` seconds later."""
    host, port, rank = launched.host, launched.port, launched.rank
    return follow(
        rank, partial(connect, host, port, rank=rank, token=launched.token, timeout_s=timeout_s, patient=True)
    )


def follow(rank: int, join: Callable[[], Spoke], *, work: Work | None = None) -> int:
    """Join and work; 0 when rank 0 has ended the run in order. Every other end has written one line to stderr."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 is interrupted, and ends this process in words
    try:
        spoke = join()
    except RunInterruptedError:
        return 1
    except RankError as error:
        say(rank, str(error))
        return 1
    try:
        if (message := _first(spoke)) is not None:
            (work or open_and_serve)(spoke, message)
    except BaseException as error:
        spoke.fail(error)
    spoke.close()
    return 0


def _first(spoke: Spoke) -> Message | None:
    """What to open; None when the run is over before."""
    said: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    spoke.on(OPEN, said.put)
    spoke.on("close", lambda message: said.put(None))
    return said.get()  # if the channel ends, so does the process


def open_and_serve(spoke: Spoke, message: Message, *, serve: Serve | None = None) -> None:
    """Plan, begin to read, import torch while bytes arrive, and hand over. Raises what these raise."""
    from streaming.prepare import prepare
    from streaming.reader_choice import start_reader
    from streaming.torch_import import import_torch

    spoke.tell_progress(Progress(stage="plan"))
    model, options = opened(message)
    prepared = prepare(model, rank_options(options, rank=spoke.rank), rank=spoke.rank)
    with closing(start_reader(prepared)) as reader:
        spoke.tell_progress(Progress(stage="import"))
        import_torch(whole=False)
        spoke.tell_progress(Progress())
        (serve or _serve())(prepared, reader, spoke)


def _serve() -> Serve:
    from streaming.ranks.serve import serve  # which needs torch

    return serve


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

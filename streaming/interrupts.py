"""Ctrl-C while modules are imported. [no-torch]

Importing torch runs destructors, callbacks, and code that catches everything; a KeyboardInterrupt that is raised in one
of them is thrown away, and the run goes on as if nobody had asked it to stop (one of ten interrupts, measured). So the
signal is kept until the import is over, or ends the process at once where nothing else runs in it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupt_kept(leave: Callable[[], None] | None = None) -> Iterator[None]:
    """Inside the block SIGINT calls `leave`, or does nothing and behind the block what it would have done.

    For the main thread; in others there is nothing to do.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield
        return
    kept: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: kept.append(number) if leave is None else leave())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if kept:
        signal.raise_signal(signal.SIGINT)

"""Waiting for others, within limits: calls made in a thread of their own, and conditions that come true."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
SOON_S = 30  # what takes longer than this does not come


def in_background(call: Callable[[], T]) -> Future[T]:
    """The call's result, to be."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="test-background", daemon=True).start()
    return future


def until(condition: Callable[[], object]) -> None:
    """Return when the condition holds, which another thread will see to."""
    deadline_s = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline_s, "what was waited for did not come"
        os.sched_yield()

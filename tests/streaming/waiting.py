"""Calls that block, made in a thread of their own."""

from __future__ import annotations

import threading
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

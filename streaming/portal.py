"""An event loop in a thread of its own, for synchronous callers.

anyio's own blocking portal runs in an executor's thread, which the interpreter joins before it runs exit handlers: a
program that forgot to close its model would never end. This one is a daemon; exit handlers close what is open.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

T = TypeVar("T")


class LoopThread:
    """The thread and its portal. `close()` ends both; safe to call twice."""

    def __init__(self) -> None:
        self._ready: Future[BlockingPortal] = Future()
        self._thread = threading.Thread(target=anyio.run, args=(self._serve,), name="firstlayer-loop", daemon=True)
        self._thread.start()
        self._portal = self._ready.result()
        self._stack = ExitStack()

    async def _serve(self) -> None:
        async with BlockingPortal() as portal:
            self._ready.set_result(portal)
            await portal.sleep_until_stopped()

    def enter(self, context: AbstractAsyncContextManager[T, Any]) -> T:
        """Enter an asynchronous context in the loop; `close()` leaves it again, and raises what leaving it raises."""
        return self._stack.enter_context(self._portal.wrap_async_context_manager(context))

    def close(self) -> None:
        """Leave the contexts, end the loop, wait for its thread."""
        try:
            self._stack.close()
        finally:
            if self._thread.is_alive():
                self._portal.call(self._portal.stop, True)  # cancels a context whose entering was interrupted
            self._thread.join()

"""Threads that carry out one job after the other for a loader, until it is closed or one of them fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from streaming.errors import StreamClosedError
from streaming.residency import Residency

J = TypeVar("J")


class Workers:
    """What a loader and its threads share: `changed`, under which all of them look and wait; `stopped`; and the first
    `error`, which closes the residency table, so that whoever waits there gets it."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self.changed = threading.Condition()
        self.stopped = False
        self.error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def start(self, count: int, *, name: str, take: Callable[[], J | None], carry_out: Callable[[J], None]) -> None:
        """Start `count` threads: each takes a job, which may wait, and carries it out; None ends it.

        The jobs' functions are the threads' alone: a loader that these referred to would be a ring.
        """
        for number in range(count):
            work = threading.Thread(target=self._work, args=(take, carry_out), name=f"{name}-{number}", daemon=True)
            self._threads.append(work)
            work.start()

    def stop(self) -> None:
        """Begin nothing more."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def wait_until(self, done: Callable[[], bool]) -> bool:
        """Block until that is so: True, or False where they were stopped before. Raises the first error."""
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or self.error is not None or done())
            if self.error is not None:
                raise self.error
            return done()

    def join(self) -> None:
        """Wait for the threads' end; only after `stop`."""
        for thread in self._threads:
            thread.join()

    def _work(self, take: Callable[[], J | None], carry_out: Callable[[J], None]) -> None:
        torch.set_num_threads(1)  # thread-local, as is the next
        with torch.inference_mode():
            try:
                while (job := take()) is not None:
                    carry_out(job)
            except StreamClosedError as error:
                self._end(None if self.stopped else error)
            except Exception as error:
                self._end(error)

    def _end(self, error: BaseException | None) -> None:
        with self.changed:
            self.stopped = True
            self.error = self.error or error
            self.changed.notify_all()
        if error is not None:
            self._residency.close(error)

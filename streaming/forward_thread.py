"""The thread in which the forward pass runs whole: one job after the other, its answers on a queue."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from streaming.errors import StreamClosedError

INTERRUPT_WAIT_S = 0.25


class RequestCancelled(Exception):  # noqa: N818  (not an error: it ends what nobody waits for)
    """Raised inside the forward pass of a request that nobody waits for any more; never reaches the user."""


@dataclass
class Job:
    """A generator to be run in the forward thread; what it yields is handed over, its error too."""

    work: Callable[[Job], Iterator[Any]]
    out: queue.SimpleQueue[tuple[str, Any]] = field(default_factory=queue.SimpleQueue)
    wake: Callable[[], None] = lambda: None
    tell: Callable[[BaseException], None] = lambda error: None
    cancelled: bool = False

    def cancel(self) -> None:
        """Nobody wants the rest: the work ends at its next look, and a wait inside it is disturbed."""
        self.cancelled = True
        self.wake()

    def results(self) -> Iterator[Any]:
        """What the work yields, as it comes (blocking). Closing this iterator cancels the work."""
        try:
            while (value := self.next_result()) is not None:
                yield value
        finally:
            self.cancel()

    def next_result(self) -> Any:
        """The next thing that the work yields (blocking), or None at its end; raises the work's error."""
        kind, value = self._taken()
        if kind == "error":
            self.tell(value)
            raise value
        return value

    def _taken(self) -> tuple[str, Any]:
        """An interrupt that comes just before the wait begins does not end it (the interpreter looks for signals, then
        blocks); so the wait is short, and begun again."""
        while True:
            try:
                return self.out.get(timeout=INTERRUPT_WAIT_S)
            except queue.Empty:
                continue


class ForwardThread:
    """One thread; torch's thread-local modes are entered inside it."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="firstlayer-forward", daemon=True)
        self._thread.start()

    def submit(
        self,
        work: Callable[[Job], Iterator[Any]],
        *,
        wake: Callable[[], None],
        tell: Callable[[BaseException], None],
    ) -> Job:
        """Queue a job; `wake` disturbs what it may be waiting in, `tell` learns which error its caller was given."""
        if self._closed:
            raise StreamClosedError("the model is closed")
        job = Job(work, wake=wake, tell=tell)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """End after the job in hand (which the caller has made to stop); waits for the thread."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        with torch.inference_mode():
            while (job := self._jobs.get()) is not None:
                self._carry_out(job)
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                job.out.put(("error", StreamClosedError("the model was closed before this request was begun")))

    def _carry_out(self, job: Job) -> None:
        try:
            for value in job.work(job):
                job.out.put(("value", value))
            job.out.put(("end", None))
        except RequestCancelled:
            job.out.put(("end", None))
        except BaseException as error:
            job.out.put(("error", error))

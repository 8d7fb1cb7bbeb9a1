"""Several connections at once for those who wait for all answers: headers, small files, embedding rows. [no-torch]

The threads are daemons, and who waits for them waits in short steps, so an interrupt ends the program at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from streaming.errors import CheckpointError, StreamClosedError
from streaming.remote.ranges import RangeFetcher, RetryPolicy

CONNECTIONS = 8
_STEP_S = 0.1
T = TypeVar("T")
_Answers = SimpleQueue[tuple[int, Any]]


class FetchPool:
    """Threads with a RangeFetcher each, started as they are needed and kept, as are their connections."""

    def __init__(self, *, policy: RetryPolicy, connections: int = CONNECTIONS) -> None:
        self._policy, self._connections = policy, connections
        self._stop = threading.Event()
        self._jobs: SimpleQueue[tuple[int, Callable[[RangeFetcher], Any], _Answers] | None] = SimpleQueue()
        self._threads, self._lock = 0, threading.Lock()

    def run(self, jobs: Sequence[Callable[[RangeFetcher], T]]) -> list[T | CheckpointError]:
        """Carry all jobs out: each one's result or CheckpointError, in order.

        Raises whatever else a job raises, and StreamClosedError when the pool is closed meanwhile.
        """
        answers: _Answers = SimpleQueue()
        for number, job in enumerate(jobs):
            self._jobs.put((number, job, answers))
        self._start(len(jobs))
        found: dict[int, Any] = {}
        while len(found) < len(jobs):
            number, value = self._wait(answers)
            if isinstance(value, BaseException) and not isinstance(value, CheckpointError):
                raise value
            found[number] = value
        return [found[number] for number in range(len(jobs))]

    def _wait(self, answers: _Answers) -> tuple[int, Any]:
        while True:
            if self._stop.is_set():
                raise StreamClosedError("the model was closed while a server was waited for")
            try:
                return answers.get(timeout=_STEP_S)
            except Empty:
                continue

    def _start(self, wanted: int) -> None:
        with self._lock:  # several may ask at once
            for _ in range(min(wanted, self._connections) - self._threads):
                threading.Thread(target=self._work, name="firstlayer-fetch", daemon=True).start()
                self._threads += 1

    def _work(self) -> None:
        with closing(RangeFetcher(policy=self._policy, stop=self._stop)) as fetcher:
            while (entry := self._jobs.get()) is not None and not self._stop.is_set():
                number, job, answers = entry
                try:
                    answers.put((number, job(fetcher)))
                except BaseException as error:
                    answers.put((number, error))

    def close(self) -> None:
        """Wait for nothing: whoever is in `run` leaves it, the threads end with their reads."""
        self._stop.set()
        for _ in range(self._threads):
            self._jobs.put(None)
        self._threads = 0

"""Room in the window, as the threads of a reader wait for it; and pieces handed out as room comes. [no-torch]"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar


class WindowRoom:
    """How many window items have been released in all, and whether reading is to end. Look at both under `changed`,
    or where a moment's delay does no harm."""

    def __init__(self) -> None:
        self.released, self.stopped = 0, False
        self.changed = threading.Condition()

    def release(self, count: int) -> None:
        """`count` window items have been released in all."""
        with self.changed:
            self.released = max(self.released, count)
            self.changed.notify_all()

    def stop(self) -> None:
        """Nothing more is to be read."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()


class Sized(Protocol):
    """A piece of the plan: its bytes, and how many window items must have been released before it is read."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        ...

    @property
    def released(self) -> int:
        """The window items that must have been released before it is read."""
        ...


P = TypeVar("P", bound=Sized)


class Batches(Generic[P]):
    """Hands out pieces in plan order, up to `limit_nbytes` at a time, each only once the window has room for it."""

    def __init__(self, pieces: Sequence[P], *, limit_nbytes: int) -> None:
        self._pieces, self._limit_nbytes, self._next = pieces, limit_nbytes, 0
        self._room = WindowRoom()
        self.release, self.stop = self._room.release, self._room.stop

    def take(self) -> list[P]:
        """The next pieces; none at the end. Only the first is waited for, so nothing can wait for each other."""
        with self._room.changed:
            while not self._room.stopped and self._next < len(self._pieces):
                if batch := self._ready():
                    self._next += len(batch)
                    return batch
                self._room.changed.wait()
            return []

    def _ready(self) -> list[P]:
        batch: list[P] = []
        nbytes = 0
        for index in range(self._next, len(self._pieces)):
            piece = self._pieces[index]
            nbytes += piece.nbytes
            if piece.released > self._room.released or (batch and nbytes > self._limit_nbytes):
                break
            batch.append(piece)
        return batch

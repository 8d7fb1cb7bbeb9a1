"""Memory that weights pass through, one behind the other, round and round: where the next one goes. Pure. [no-torch]

A run of bytes is given back in the order in which it was taken, or marked so and given back when those before it are:
what is used in order frees in order. A run never wraps over the end, so it may have to wait although there are enough
bytes in two places.
"""

from __future__ import annotations

from collections import deque

from streaming.read_plan import aligned


class Ring:
    """Places runs of bytes in `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._runs: deque[_Run] = deque()  # oldest first
        self._head = 0

    def place(self, nbytes: int) -> int | None:
        """Where `nbytes` go, or None while there is no room. Raises ValueError for more than there will ever be."""
        if nbytes > self.capacity:
            raise ValueError(f"{nbytes:,} bytes do not fit into a ring of {self.capacity:,}")
        if not self._runs:
            self._head = 0
        start = self._find(nbytes)
        if start is not None:
            self._runs.append(_Run(start, start + nbytes))
            self._head = aligned(start + nbytes)
        return start

    def has_room(self, nbytes: int) -> bool:
        """Whether `place` would find some now."""
        return not self._runs or self._find(nbytes) is not None

    def _find(self, nbytes: int) -> int | None:
        if not self._runs:
            return 0
        tail = self._runs[0].start
        if self._runs[-1].start >= tail:  # what is held does not wrap: behind it, or before it
            if self._head + nbytes <= self.capacity:
                return self._head
            return 0 if nbytes <= tail else None
        return self._head if self._head + nbytes <= tail else None

    def free(self, start: int) -> None:
        """The run that begins there is not needed any more. Raises ValueError for none of those held."""
        run = next((run for run in self._runs if run.start == start and not run.is_free), None)
        if run is None:
            raise ValueError(f"no run of the ring begins at {start:,}")
        run.is_free = True
        while self._runs and self._runs[0].is_free:
            self._runs.popleft()

    @property
    def held_nbytes(self) -> int:
        """Bytes of runs that are not free."""
        return sum(run.stop - run.start for run in self._runs if not run.is_free)


class _Run:
    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop, self.is_free = start, stop, False

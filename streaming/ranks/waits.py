"""Which rank the others waited for: long waits in collectives, told to rank 0 and put together there. [no-torch]

A collective ends when its last rank comes. Ranks that come early wait; the one that does not is the one that they have
waited for. Collectives of a group are numbered alike on all of its ranks, so waits for the same one can be compared.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

WAITED, STOOD = "waited", "stood"  # kinds of messages
LONG_S = 0.05  # shorter waits are the usual unevenness of ranks
_ON_ITS_WAY_S = 0.3  # that a message from another rank may take
MOST = 20_000  # that are kept until they are settled, as the trace keeps the first spans of a lane
_SHARE = 0.5  # of rank 0's wait, from which on another rank is taken to have waited along


@dataclass(frozen=True)
class Wait:
    """One long wait: the `number`-th collective of the group of these ranks, on the monotonic clock of one machine."""

    ranks: tuple[int, ...]
    number: int
    begin_s: float
    end_s: float
    layer: str = ""

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end_s - self.begin_s


@dataclass
class Meter:
    """Numbers a group's collectives, and tells of long waits in them. To be used from one thread."""

    ranks: tuple[int, ...]
    tell: Callable[[Wait], None]
    layer: Callable[[], str] = str
    _number: int = 0

    def note(self, begin_s: float) -> None:
        """A collective that was entered at `begin_s` is over."""
        end_s = time.monotonic()
        self._number += 1
        if end_s - begin_s >= LONG_S:
            self.tell(Wait(self.ranks, self._number, begin_s, end_s, self.layer()))


@dataclass
class Waits:
    """Rank 0's waits, and what other ranks say of theirs. Safe to call from any thread."""

    _own: list[Wait] = field(default_factory=list)
    _others: dict[tuple[tuple[int, ...], int], dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    _stood: list[tuple[int, float, float]] = field(default_factory=list)  # rank, from when to when
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note_stood(self, rank: int, seconds: float) -> None:
        """Another rank has stood still until now: it was stopped, perhaps while it waited along."""
        now = time.monotonic()
        with self._lock:
            self._stood.append((rank, now - seconds, now))

    def note_own(self, wait: Wait) -> None:
        """Rank 0 has waited."""
        with self._lock:
            if len(self._own) < MOST:
                self._own.append(wait)

    def note_other(self, rank: int, ranks: tuple[int, ...], number: int, seconds: float) -> None:
        """Another rank has."""
        with self._lock:
            if len(self._others) < MOST or (ranks, number) in self._others:
                self._others[ranks, number][rank] = seconds

    def settle(self) -> Iterator[tuple[str, Wait]]:
        """Rank 0's waits since the last call, each with who was waited for, such as "rank 3"; "other ranks" where none
        says that it came late, or stood still while it waited along. Where one has just ended, what the others say of
        it is given a moment to come."""
        with self._lock:
            since = time.monotonic() - max((wait.end_s for wait in self._own), default=0.0)
        if since < _ON_ITS_WAY_S:
            time.sleep(_ON_ITS_WAY_S - since)
        with self._lock:
            own, self._own = self._own, []
            others = {key: dict(found) for key, found in self._others.items()}
            self._others.clear()
            stood, self._stood = self._stood, []
        for wait in own:
            along = others.get((wait.ranks, wait.number), {})
            late = [rank for rank in wait.ranks if rank and along.get(rank, 0.0) < _SHARE * wait.seconds]
            late = late or [rank for rank, *stood_still in stood if rank in wait.ranks and _covers(stood_still, wait)]
            yield f"rank {', '.join(map(str, late))}" if late else "other ranks", wait


def _covers(span: Sequence[float], wait: Wait) -> bool:
    """Whether most of a wait lies in the span [begin, end]."""
    return min(span[1], wait.end_s) - max(span[0], wait.begin_s) >= _SHARE * wait.seconds

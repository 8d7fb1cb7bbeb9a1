"""Whether it pays to fetch experts that are only thought to be needed: by how often that was right, and by the clock.

While a layer computes, for c seconds, the disk would rest. A unit takes l seconds to fetch, and of the foreseen ones a
share q is needed. Fetched ahead, a unit that is needed saves the c seconds of its way that lie behind it; one that is
not holds others up for the l - c seconds that are left of it. So it pays where q c > (1 - q) (l - c), which is the same
as c > (1 - q) l. Simulated on a trained model's routing in BENCHMARKS.md. A unit that comes within 2 ms is not worth
it: what fetches it holds up what computes for as long (two cores, units of 110 KB in the page cache: 62 tokens a second
with, 82 without). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_FETCH_S = 0.002
LEAST_SHARE_RIGHT = 0.3  # each that is wrong takes the place of another, and reads bytes that others want to read
_STEP = 0.05  # how far each new measurement moves an average
_RECENT = 512.0  # of foreseen units; older ones count half


@dataclass
class Outlook:
    """Averages of what was measured. Until something was, nothing is fetched ahead."""

    compute_s: float = 0.0
    fetch_s: float = 0.0
    _right: float = 1.0  # as if two units had been foreseen and one of them been needed
    _foreseen: float = 2.0

    @property
    def share_right(self) -> float:
        """Of the foreseen units that were absent, those that were needed."""
        return self._right / self._foreseen

    @property
    def is_worth_a_look(self) -> bool:
        """Whether units take long enough to fetch."""
        return self.fetch_s >= LEAST_FETCH_S

    @property
    def pays(self) -> bool:
        """Whether to fetch ahead."""
        q = self.share_right
        return self.is_worth_a_look and q >= LEAST_SHARE_RIGHT and self.compute_s > (1.0 - q) * self.fetch_s

    def computed(self, seconds: float) -> None:
        """From one sparse layer to the next, without waits."""
        self.compute_s += (seconds - self.compute_s) * (_STEP if self.compute_s else 1.0)

    def fetched(self, seconds: float) -> None:
        """One unit."""
        self.fetch_s += (seconds - self.fetch_s) * (_STEP if self.fetch_s else 1.0)

    def came_true(self, right: int, foreseen: int) -> None:
        """So many of the foreseen units, absent when they were, were needed."""
        self._right += right
        self._foreseen += foreseen
        if self._foreseen > _RECENT:
            self._right /= 2.0
            self._foreseen /= 2.0

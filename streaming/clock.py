"""The moments of a run that its summary is made of, on time.monotonic's clock."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from streaming.stats import process_start_s


@dataclass
class RunClock:
    """`start_s` is where `ttft_s` and its like count from: the start of the process, or of the call for a library."""

    start_s: float = field(default_factory=process_start_s)
    imports_done_s: float | None = None
    load_begin_s: float | None = None
    load_end_s: float | None = None

    def since_start(self, moment_s: float | None) -> float | None:
        """Seconds from the start to a moment; None when it has not come."""
        return None if moment_s is None else moment_s - self.start_s

    def once(self, name: str) -> None:
        """Note the moment `name` now, unless it has been noted."""
        if getattr(self, name) is None:
            setattr(self, name, time.monotonic())

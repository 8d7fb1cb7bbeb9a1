"""What a follower tells of its load when it is over, and of its memory since. [no-torch]"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

REPORT, WARNING = "report", "warning"  # kinds of messages
_GROWN = 1 << 20  # bytes of memory that are worth another report


@dataclass(frozen=True)
class RankReport:
    """One rank's bytes: read from files, kept as weights, and the peak of its processes' memory so far."""

    bytes_read: int
    bytes_kept: int
    peak_rss_bytes: int

    def message(self) -> dict[str, object]:
        """As it travels."""
        return {"kind": REPORT, **asdict(self)}

    @classmethod
    def of(cls, message: Mapping[str, object]) -> RankReport:
        """What a message says."""
        read, kept, peak = (int(str(message[name])) for name in ("bytes_read", "bytes_kept", "peak_rss_bytes"))
        return cls(read, kept, peak)

    def is_outgrown(self, peak_rss_bytes: int) -> bool:
        """Whether a peak is so far above this one that it is worth another report."""
        return peak_rss_bytes - self.peak_rss_bytes >= _GROWN

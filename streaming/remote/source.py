"""What every kind of server offers to those who read ranges: the seam between retrying and transport. [no-torch]"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Head:
    """A file as the server describes it: its size in bytes, and the marks of its version."""

    nbytes: int
    etag: str | None = None
    modified: str | None = None


class Body(Protocol):
    """The bytes of one answer, as they arrive."""

    @property
    def head(self) -> Head:
        """The whole file."""
        ...

    @property
    def stop(self) -> int:
        """Where this answer ends in the file; a server may give less than was asked."""
        ...

    def readinto(self, view: memoryview) -> int:
        """Some bytes, at least one; 0 when the answer has ended. Raises TransientError."""
        ...

    def close(self) -> None:
        """Done with it, whether it was read to its end or not."""
        ...


class Source(Protocol):
    """One thread's way to the files of a server."""

    def open(self, url: str, *, start: int, stop: int, expected: Head | None) -> Body:
        """Begin to read [start, stop). `expected`: the version that it must be.

        Raises TransientError for what may be tried again, else CheckpointError naming the file.
        """
        ...

    def whole(self, url: str, *, etag: str | None, limit: int) -> tuple[bytes, str | None] | None:
        """A small file and its ETag; None when it still has the given `etag`. Raises as `open` does."""
        ...

    def close(self) -> None:
        """Give connections back."""
        ...

"""What can go wrong between here and a server: what may be tried again, and what may not. [no-torch]"""

from __future__ import annotations

from streaming.errors import CheckpointError


class TransientError(Exception):
    """The next attempt may succeed; `wait_s` is how long the server asks to wait."""

    def __init__(self, words: str, *, wait_s: float | None = None) -> None:
        super().__init__(words)
        self.wait_s = wait_s


class RemoteMissingError(CheckpointError):
    """The server says that there is no such file."""


class RemoteForbiddenError(CheckpointError):
    """The server does not let us read the file."""


def changed(url: str, what: str) -> CheckpointError:
    """The error for a file that is not the one whose header was read."""
    return CheckpointError(f"{url}: changed on the server during the load ({what}); start again")

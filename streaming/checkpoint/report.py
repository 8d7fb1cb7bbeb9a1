"""Every problem of a checkpoint in one error: parts of it add lines, the whole is raised once. [no-torch]"""

from __future__ import annotations

from streaming.errors import CheckpointError, CheckpointFormatError

_SHOWN = 20  # lines that the message itself spells out
MOST_PROBLEMS = 10_000  # that `problems` holds; a broken header can have one for every few of its bytes


class Report:
    """Collects what is wrong while the headers of one checkpoint are read."""

    def __init__(self, subject: object) -> None:
        self._subject = subject
        self._problems: list[str] = []
        self._count = 0
        self._broken = False

    def __bool__(self) -> bool:
        """Whether anything is wrong so far."""
        return bool(self._problems)

    def add(self, problem: str, *, broken: bool = False) -> None:
        """Note one problem; `broken` says that a file is not what it should be (and not just absent)."""
        self._count += 1
        if len(self._problems) < MOST_PROBLEMS:
            self._problems.append(problem)
        self._broken = self._broken or broken

    def absorb(self, error: CheckpointError) -> None:
        """Note all problems of an error that one part raised."""
        self._count += len(error.problems)
        self._problems.extend(error.problems[: MOST_PROBLEMS - len(self._problems)])
        self._broken = self._broken or isinstance(error, CheckpointFormatError)

    def raise_if_any(self) -> None:
        """Raise what was noted: CheckpointFormatError where a file is broken, else CheckpointError."""
        if not self._problems:
            return
        kind = CheckpointFormatError if self._broken else CheckpointError
        raise kind(self._message(), tuple(self._problems))

    def _message(self) -> str:
        if self._count == 1:
            return self._problems[0]
        shown = "; ".join(self._problems[:_SHOWN])
        more = self._count - _SHOWN
        rest = f"; and {more} more" if more > 0 else ""
        return f"{self._count} problems in {self._subject}: {shown}{rest}"

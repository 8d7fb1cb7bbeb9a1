"""When an answer ends: at stop ids, and at stop strings wherever tokens cut them. [no-torch]"""

from __future__ import annotations

from collections.abc import Iterable

from streaming.errors import OptionError


class StopChecker:
    """Watches ids and text as they come, and lets through the text that surely belongs to the answer.

    Text that may be the beginning of a stop string is held back until that is decided; a stop string itself is never
    let through. The text ends where the first stop string is complete (of several that end there, the longest), so
    the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stop_ids: Iterable[int] = (), stop_strings: Iterable[str] = ()) -> None:
        self.stop_ids = frozenset(stop_ids)
        self.stop_strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
        if "" in self.stop_strings:
            raise OptionError(
                "a stop string is empty, which would stop before the first word; give at least one character"
            )
        self._longest = max(map(len, self.stop_strings), default=0)
        self._held = ""
        self._matched: int | str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop id or a stop string was met."""
        return self._matched is not None

    @property
    def matched(self) -> int | str | None:
        """What was met: the id or the string."""
        return self._matched

    def check_id(self, token_id: int) -> bool:
        """Whether the token ends the generation. Ask before its text is pushed: a stop token has none to print."""
        if token_id in self.stop_ids and self._matched is None:
            self._matched = token_id
        return self.stopped

    def push(self, text: str) -> str:
        """The text that can be printed now. After a stop string was met there is none, whatever comes."""
        if isinstance(self._matched, str):
            return ""
        text = self._held + text
        found = self._first_complete(text)
        if found is not None:
            start, self._matched = found
            self._held = ""
            return text[:start]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        text, self._held = self._held, ""
        return text

    def _first_complete(self, text: str) -> tuple[int, str] | None:
        """Start and text of the stop string that is complete first; the longest of those that end there."""
        starts = ((text.find(stop), stop) for stop in self.stop_strings)
        found = [(start + len(stop), -len(stop), start, stop) for start, stop in starts if start >= 0]
        return min(found)[2:] if found else None

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stop_strings):
                return length
        return 0

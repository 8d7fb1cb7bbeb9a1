"""Readers that hold pieces back until a test lets them through, and that write down what was in the window when."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

from streaming.hooks import Hooks
from streaming.llm import LLM, LoadKeywords
from streaming.prepare import Prepared
from streaming.read_plan import Region
from streaming.reader import Reader, ThreadReader


class Gate:
    """Pieces of a layer are read once the layer was let through."""

    def __init__(self, *, opened: bool = False) -> None:
        self._changed = threading.Condition()
        self._layers: set[str] = set()
        self._opened, self._abandoned = opened, False

    def let(self, *layers: str) -> None:
        """Let these layers through too."""
        with self._changed:
            self._layers.update(layers)
            self._changed.notify_all()

    def open(self) -> None:
        """Let everything through."""
        with self._changed:
            self._opened = True
            self._changed.notify_all()

    def abandon(self) -> None:
        """Nothing more will be let through: whoever waits fails."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def hold(self, layer: str) -> None:
        """Wait for the layer's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._opened or self._abandoned or layer in self._layers)
            if not self._opened and layer not in self._layers:
                raise OSError(errno.ECANCELED, "the gate was abandoned")


class GatedReader(ThreadReader):
    """A ThreadReader behind a gate."""

    def __init__(self, prepared: Prepared, gate: Gate, *, before: Callable[[int], None] | None = None) -> None:
        layers = [item.layer for item in prepared.plan.items]
        pieces = prepared.read_plan.pieces
        self._gate = gate

        def hold(piece: int) -> None:
            gate.hold(layers[pieces[piece].item])
            if before is not None:
                before(piece)

        super().__init__(prepared.read_plan, before=hold)

    def close(self) -> None:
        self._gate.abandon()
        super().close()


@dataclass
class WindowLog:
    """The pieces in the order in which they were begun, and the most bytes that the window held at once."""

    begun: list[int] = field(default_factory=list)
    peak_nbytes: int = 0


class LoggedReader(GatedReader):
    """A reader that counts the bytes of items that were begun and are not released."""

    def __init__(self, prepared: Prepared, gate: Gate, log: WindowLog) -> None:
        items, self._lock = prepared.plan.items, threading.Lock()
        pieces = prepared.read_plan.pieces
        self._staged = [item.index for item in items if not item.direct]
        self._given_back, live = 0, set[int]()

        def note(piece: int) -> None:
            with self._lock:
                log.begun.append(piece)
                if pieces[piece].region is Region.WINDOW:
                    live.add(pieces[piece].item)
                live.difference_update(self._staged[: self._given_back])
                log.peak_nbytes = max(log.peak_nbytes, sum(items[index].nbytes for index in live))

        super().__init__(prepared, gate, before=note)

    def release(self, count: int) -> None:
        with self._lock:
            self._given_back = count
        super().release(count)


@contextmanager
def reading_with(reader_of: Callable[[Prepared], Reader]) -> Iterator[None]:
    """`LLM` uses this reader while the block runs."""
    with mock.patch("streaming.llm.start_reader", reader_of):
        yield


def gated_llm(model: object, gate: Gate, *, hooks: Hooks | None = None, **options: object) -> LLM:
    """An LLM whose reader stands behind the gate."""
    keywords: LoadKeywords = options  # type: ignore[assignment]
    with reading_with(lambda prepared: GatedReader(prepared, gate)):
        return LLM(str(model), hooks=hooks or Hooks(), **keywords)

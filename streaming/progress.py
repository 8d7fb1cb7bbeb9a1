"""Live progress on a terminal: one line per layer as it is read, quantized and made ready, gone before text appears.

A layer that is ready leaves its line behind; below those, the layers on their way and one line of totals are redrawn in
place. Text and progress share the screen, so from the first piece of text on nothing more is written. On anything that
is no terminal nothing is written at all; on one that is too narrow, or cannot move its cursor, only the finished lines.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TextIO

from streaming.sizes import format_size

_NARROW = 48  # columns below which lines would be cut too short to redraw them in place
_REDRAW_S = 0.05  # the least time between two redraws of lines that are not finished
_MAX_LIVE = 8  # lines redrawn in place, so that the block never grows taller than the screen


class Reached(Enum):
    """How far a layer has come."""

    READ = "read"
    QUANTIZED = "quantized"
    READY = "ready"


@dataclass(frozen=True)
class Step:
    """What it took to reach it: bytes read or kept, and seconds; 0 where that is not known."""

    nbytes: int = 0
    seconds: float = 0.0


class Progress:
    """Draws the state of all layers on `stream`. Safe to call from any thread; never raises for a broken stream.

    `layers` holds every layer's name in plan order; `enabled` is false for --quiet. `columns` overrides the terminal's
    width, `clock` gives seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        layers: Sequence[str],
        enabled: bool,
        columns: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream, self._clock = stream, clock
        self._steps: dict[str, dict[Reached, Step]] = {layer: {} for layer in layers}
        self._lock = threading.Lock()
        self._drawing = enabled and stream.isatty()
        self._columns = columns if columns is not None else terminal_columns(stream) if self._drawing else 0
        self._in_place = self._columns >= _NARROW and os.environ.get("TERM") != "dumb"
        self._ranks: Callable[[], Mapping[int, tuple[str, str]]] = dict
        self._live = 0  # lines of the block that is on the screen now
        self._start_s = self._drawn_s = clock()

    def show_ranks(self, ranks: Callable[[], Mapping[int, tuple[str, str]]]) -> None:
        """Where the other ranks are: `ranks()` gives layer and stage of each; a line of them is above the totals."""
        with self._lock:
            self._ranks = ranks

    def update(self, layer: str, reached: Reached, *, nbytes: int = 0, seconds: float = 0.0) -> None:
        """The layer has come this far; `nbytes` and `seconds` are the whole layer's for this step."""
        with self._lock:
            steps = self._steps[layer]
            news = reached not in steps
            steps[reached] = Step(nbytes, seconds)
            if self._drawing:
                self._draw(self._line(layer) if news and reached is Reached.READY else "")

    def note(self, text: str) -> None:
        """A line of its own (a warning), above what is redrawn; it is written whether or not anything is drawn."""
        with self._lock:
            self._write([text], self._block() if self._drawing and self._in_place else [])

    def text_begins(self) -> None:
        """The first piece of text is about to be written: leave one line of totals, and write nothing from now on."""
        with self._lock:
            self._end()

    def close(self) -> None:
        """Loading is over, well or not: the same as `text_begins`, and nothing where that was called."""
        with self._lock:
            self._end()

    def _draw(self, finished: str) -> None:
        now_s = self._clock()
        if not finished and (not self._in_place or now_s - self._drawn_s < _REDRAW_S):
            return
        self._drawn_s = now_s
        block = self._block() if self._in_place else []
        self._write([finished] if finished else [], block)

    def _block(self) -> list[str]:
        moving = [layer for layer, steps in self._steps.items() if steps and Reached.READY not in steps]
        others = self._ranks()
        lines = [self._line(layer) for layer in moving[: _MAX_LIVE - 1 - bool(others)]]
        return [*lines, *([ranks_line(others, columns=self._columns)] if others else []), self._totals()]

    def _end(self) -> None:
        if self._drawing:
            self._write([self._totals()] if any(self._steps.values()) else [], [])
            self._drawing = False

    def _line(self, layer: str) -> str:
        name_width = max(len(name) for name in self._steps)
        return layer_line(layer, self._steps[layer], name_width=name_width, columns=self._columns)

    def _totals(self) -> str:
        return totals_line(self._steps, seconds=self._clock() - self._start_s, columns=self._columns)

    def _write(self, finished: list[str], block: list[str]) -> None:
        """Replace the block on the screen by lines that stay and a new block below them."""
        clear = f"\x1b[{self._live}A\r\x1b[J" if self._live else ""
        self._live = len(block)
        try:
            self._stream.write(clear + "".join(f"{line}\n" for line in [*finished, *block]))
            self._stream.flush()
        except (OSError, ValueError):  # whoever watched has gone, or closed the stream; loading goes on
            self._drawing = False


def layer_line(name: str, steps: Mapping[Reached, Step], *, name_width: int, columns: int) -> str:
    """One layer's line, such as "layers.3  read 7.1 MiB 0.02 s  quantized 3.6 MiB 0.05 s  ready"."""
    words = [name.ljust(name_width)]
    words += [_step_words(reached, steps[reached]) for reached in Reached if reached in steps]
    return _fit("  ".join(words), columns)


def ranks_line(ranks: Mapping[int, tuple[str, str]], *, columns: int) -> str:
    """Where each rank is, such as "rank 1 layers.3 quantize  rank 2 loaded"; those that wait for steps have loaded."""
    words = (
        f"rank {rank} {layer} {stage}" if layer else f"rank {rank} {stage}" for rank, (layer, stage) in ranks.items()
    )
    return _fit("  ".join(words).replace("forward", "loaded"), columns)


def totals_line(layers: Mapping[str, Mapping[Reached, Step]], *, seconds: float, columns: int) -> str:
    """The line of totals, such as "18 of 32 layers ready  126.3 MiB read  1.2 s"."""
    ready = sum(Reached.READY in steps for steps in layers.values())
    read_nbytes = sum(steps[Reached.READ].nbytes for steps in layers.values() if Reached.READ in steps)
    line = f"{ready} of {len(layers)} layers ready  {format_size(read_nbytes)} read  {seconds:.1f} s"
    return _fit(line, columns)


def _step_words(reached: Reached, step: Step) -> str:
    nbytes = format_size(step.nbytes) if step.nbytes else ""
    seconds = f"{step.seconds:.2f} s" if step.seconds else ""
    return " ".join(word for word in (reached.value, nbytes, seconds) if word)


def _fit(line: str, columns: int) -> str:
    """Cut to less than the width: a line that wraps would be two, and the block could not be redrawn."""
    return line[: max(columns - 1, 0)]


def terminal_columns(stream: TextIO) -> int:
    """How wide the terminal behind a stream is; 80 where that is not known."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80  # 0: a terminal that was never given a size
    except (OSError, ValueError):  # no file behind the stream
        return 80

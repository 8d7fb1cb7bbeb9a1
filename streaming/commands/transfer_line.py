"""A fetch from the hub as the command line shows it: one line on a terminal that is redrawn, nothing anywhere else."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from streaming import cli
from streaming.checkpoint.hub import Tell, Transfer
from streaming.sizes import format_size

_REDRAW_S = 0.1


class TransferLine:
    """Draws how far a fetch has come. `tell` may be called from any thread; a broken stream ends the drawing."""

    def __init__(
        self, stream: TextIO, *, name: str, enabled: bool, columns: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._name, self._clock = stream, name, clock
        self._drawing = enabled and stream.isatty()
        self._columns = columns or 80
        self._lock = threading.Lock()
        self._start_s = clock()
        self._drawn_s: float | None = None
        self._last: Transfer | None = None

    def tell(self, state: Transfer) -> None:
        """So far it has come."""
        with self._lock:
            self._last = state
            now_s = self._clock()
            if state.files and (self._drawn_s is None or now_s - self._drawn_s >= _REDRAW_S):
                self._drawn_s = now_s
                self._write(f"\r{self._line(state)}\x1b[K")

    def close(self) -> None:
        """The fetch is over, well or not: the line stays as it is now."""
        with self._lock:
            if self._last is not None and self._drawn_s is not None:
                self._write(f"\r{self._line(self._last)}\x1b[K\n")
            self._drawing = False

    @property
    def nbytes_done(self) -> int:
        """Bytes fetched so far."""
        return self._last.nbytes_done if self._last is not None else 0

    def _line(self, state: Transfer) -> str:
        line = transfer_line(self._name, state, seconds=self._clock() - self._start_s)
        return line[: self._columns - 1]  # a line that wraps could not be redrawn in place

    def _write(self, text: str) -> None:
        if not self._drawing:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._drawing = False


def transfer_line(name: str, state: Transfer, *, seconds: float) -> str:
    """Such as "acme/tiny  2 of 3 files  1.0 GiB of 4.0 GiB  50.0 MiB/s  61 s left"."""
    words = [name, f"{state.files_done} of {state.files} files"]
    words.append(f"{format_size(state.nbytes_done)} of {format_size(state.nbytes)}")
    if seconds > 0 and state.nbytes_done:
        rate = state.nbytes_done / seconds
        words.append(f"{format_size(rate)}/s")
        if state.nbytes_done < state.nbytes:
            words.append(f"{(state.nbytes - state.nbytes_done) / rate:.0f} s left")
    return "  ".join(words)


def with_line(options: argparse.Namespace, fetch: Callable[[Tell], Path]) -> tuple[Path, int]:
    """Fetch with the line drawn: what was fetched, and how many bytes came.

    An interrupt ends the process at once: a thread of the client may be waiting for the network still.
    """
    from streaming.progress import terminal_columns

    enabled = not (options.quiet or options.json)
    line = TransferLine(sys.stderr, name=options.model, enabled=enabled, columns=terminal_columns(sys.stderr))
    try:
        found = fetch(line.tell)
    except KeyboardInterrupt:
        line.close()
        cli.leaver(options)()
        raise
    finally:
        line.close()
    return found, line.nbytes_done


def fetch_first(options: argparse.Namespace) -> None:
    """Bring a hub id that is not in the cache, before a command that would do so without a line. OptionError first."""
    import os

    from streaming.checkpoint.formats import check_encoder_format, check_load_format, encoder_format
    from streaming.checkpoint.hub import parse_hub_id
    from streaming.checkpoint.hub_location import uses_modelscope
    from streaming.checkpoint.location import locate
    from streaming.checkpoint.parts import Part

    name, revision, load_format = options.model, options.revision, options.load_format
    if os.path.lexists(name) or load_format == "remote" or uses_modelscope():
        return
    cli.load_options(options)
    check_load_format(load_format)
    part = Part(getattr(options, "part", "language"))  # what `inspect` can be asked
    if part is Part.ENCODER:
        from streaming.commands.encoder_listing import check_options

        check_options(options)
        check_encoder_format(load_format)
        load_format = encoder_format(load_format)
    if parse_hub_id(name, revision=revision) is not None:
        with_line(options, lambda tell: locate(name, revision=revision, load_format=load_format, tell=tell, part=part))

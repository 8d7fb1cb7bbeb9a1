"""Keeps a package's own last words off the screen: compiled code writes to descriptor 2 before Python hears of it.

The descriptor belongs to the whole process. What others write meanwhile is held back and written afterwards; only where
the call fails by a panic is it dropped, because nothing tells the two apart. [no-torch]
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Iterator

_KEPT_NBYTES = 1 << 20
_ONE_AT_A_TIME = threading.RLock()  # two that swap the descriptor at once would put each other's back


@contextlib.contextmanager
def without_panic_text() -> Iterator[None]:
    """Within the block, what is written to standard error waits; it is lost where the block ends in a panic."""
    with _ONE_AT_A_TIME, contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(tempfile.TemporaryFile(buffering=0))
            _flush()
            shown = os.dup(2)
        except OSError:  # no standard error, no room, no descriptor: then the text is shown
            shown = -1
        if shown < 0:
            yield
            return
        stack.callback(os.close, shown)
        os.dup2(held.fileno(), 2)
        panicked = False
        try:
            yield
        except BaseException as error:
            panicked = is_panic(error)
            raise
        finally:
            _flush()
            os.dup2(shown, 2)
            if not panicked:
                _show(held.fileno())


def is_panic(error: BaseException) -> bool:
    """Whether it is how compiled (Rust) code says that it could not go on: no Exception, by design of PyO3."""
    return type(error).__name__ == "PanicException"


def _flush() -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()


def _show(held: int) -> None:
    os.lseek(held, 0, os.SEEK_SET)
    if text := os.read(held, _KEPT_NBYTES):
        with contextlib.suppress(OSError):
            os.write(2, text)

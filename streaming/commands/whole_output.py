"""A file that a command writes is there whole or not at all: written beside under another name, then renamed."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


class Sink:
    """Takes bytes, and nothing else: numpy gives what it knows as a file to the C library, which loses errors of the
    last few kilobytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytes) -> int:
        """Write all of it. Raises OSError."""
        return self._file.write(data)


@contextlib.contextmanager
def whole_output(path: Path) -> Iterator[Sink]:
    """Write to what is given; `path` holds it once the block has ended without an error, and nothing of it otherwise.

    What stood there before stays until then. A device or a pipe (/dev/stdout) is written to as it is: it has no
    "before". Raises OSError naming `path`, as for a full disk.
    """
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield Sink(file)
        return
    target = path.resolve()  # a link stays one
    beside = target.with_name(f".{target.name[:200]}.{uuid.uuid4().hex}.partial")
    try:
        with beside.open("xb") as file:
            yield Sink(file)
            file.flush()
            os.fsync(file.fileno())  # some file systems tell of a full disk no earlier
        os.replace(beside, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error
        raise

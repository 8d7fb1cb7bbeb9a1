"""What a reader's program is told of each piece, and what it says to the process that started it, byte for byte.

[no-torch]
"""

from __future__ import annotations

import errno
import struct
import sys
from typing import NamedTuple

from streaming.column_reads import span_nbytes

RECORD = struct.Struct("<iidd")  # piece, errno (0 = done, or below 0), start and end on the monotonic clock
COUNT = struct.Struct("<Q")  # the other way: how many window items have been released in all
SHORT = -1  # the file ended within the piece


class FlatPiece(NamedTuple):
    """One piece of the plan as a reader's program is told; `streaming.read_plan.Piece` says what each number is."""

    file: int
    offset: int
    nbytes: int
    region: int
    dest: int
    released: int
    run_nbytes: int = 0  # 0: the piece is one run
    stride_nbytes: int = 0

    @property
    def span_nbytes(self) -> int:
        """Bytes of its file from its first to behind its last."""
        return span_nbytes(self.nbytes, self.run_nbytes, self.stride_nbytes)


def fault_code(error: Exception) -> int:
    """The errno that a record has for an error. One that nobody foresaw is EIO, and a line on the error output: a
    thread that ended without a record would leave whoever waits for its piece waiting."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    sys.stderr.write(f"firstlayer: the reader: {type(error).__name__}: {error}\n")
    return errno.EIO

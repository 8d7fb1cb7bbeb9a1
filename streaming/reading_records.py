"""What a reader's program says to the process that started it, byte for byte. [no-torch]"""

from __future__ import annotations

import errno
import struct
import sys

RECORD = struct.Struct("<iidd")  # piece, errno (0 = done, or below 0), start and end on the monotonic clock
COUNT = struct.Struct("<Q")  # the other way: how many window items have been released in all
SHORT = -1  # the file ended within the piece


def fault_code(error: Exception) -> int:
    """The errno that a record has for an error. One that nobody foresaw is EIO, and a line on the error output: a
    thread that ended without a record would leave whoever waits for its piece waiting."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    if isinstance(error, MemoryError):
        return errno.ENOMEM
    sys.stderr.write(f"firstlayer: the reader: {type(error).__name__}: {error}\n")
    return errno.EIO

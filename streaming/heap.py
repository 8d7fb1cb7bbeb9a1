"""What the C library holds back of memory that was freed, given to the system. [no-torch]"""

from __future__ import annotations

import ctypes
from contextlib import suppress


def trim_heap() -> None:
    """Give back what is free (glibc; nothing elsewhere). After a load it holds what decoding and quantizing took for a
    while: memory that a limit has not counted."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)

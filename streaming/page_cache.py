"""The system's page cache, treated with care: what is read once in a while is not worth keeping there. [no-torch]"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress

LOOK_NBYTES = 2 << 20
O_DIRECT = getattr(os, "O_DIRECT", 0)  # of open: past the cache; 0 where there is no such thing
_CACHESTAT = 451  # Linux 6.5; numbers since 424 are the same on every machine but two
_IS_COUNTED = sys.platform == "linux" and not os.uname().machine.startswith(("alpha", "mips"))
_LIBRARY = ctypes.CDLL(None)


class _Range(ctypes.Structure):
    """Of a file, in bytes."""

    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    """How many of the range's pages are in the cache, and in which states."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "evicted_lately"))


def is_cached(descriptor: int, offset: int, nbytes: int) -> bool:
    """Whether a file's bytes are in the page cache: all of their pages where the system counts them (one call, 1
    microsecond a MB measured); else by a look at the first, the middle and the last byte, and at one of each
    `LOOK_NBYTES`. False where the system does not tell, and for no bytes."""
    if not nbytes:
        return False
    count = _cached_pages(descriptor, offset, nbytes)
    if count is None:
        return _looks_cached(descriptor, offset, nbytes)
    return count == (offset + nbytes - 1) // mmap.PAGESIZE - offset // mmap.PAGESIZE + 1


def _cached_pages(descriptor: int, offset: int, nbytes: int) -> int | None:
    """Pages of the cache that hold these bytes; None where the system does not count them, or not for this file: it
    may ask for the right to write to it."""
    if not _IS_COUNTED:
        return None
    number, file, no_flags = ctypes.c_long(_CACHESTAT), ctypes.c_uint(descriptor), ctypes.c_uint(0)
    pages = _Pages()
    failed = _LIBRARY.syscall(number, file, ctypes.byref(_Range(offset, nbytes)), ctypes.byref(pages), no_flags)
    return None if failed else int(pages.cached)


def _looks_cached(descriptor: int, offset: int, nbytes: int) -> bool:
    byte = bytearray(1)
    try:
        return all(
            os.preadv(descriptor, [byte], offset + at, os.RWF_NOWAIT) == 1
            for at in (0, nbytes // 2, nbytes - 1, *range(LOOK_NBYTES, nbytes - 1, LOOK_NBYTES))
        )
    except (OSError, AttributeError, NotImplementedError):
        return False


def drop(descriptor: int, offset: int, nbytes: int) -> None:
    """Let the system drop a file's bytes from the page cache."""
    with suppress(OSError, AttributeError):
        os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)

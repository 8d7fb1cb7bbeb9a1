"""The system's page cache, treated with care: what is read once in a while is not worth keeping there. [no-torch]"""

from __future__ import annotations

import os
from contextlib import suppress

LOOK_NBYTES = 2 << 20
O_DIRECT = getattr(os, "O_DIRECT", 0)  # of open: past the cache; 0 where there is no such thing


def is_cached(descriptor: int, offset: int, nbytes: int) -> bool:
    """Whether a file's bytes are in the page cache, by a look at the first, the middle and the last of them, and at one
    of each `LOOK_NBYTES`. False where the system does not tell."""
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

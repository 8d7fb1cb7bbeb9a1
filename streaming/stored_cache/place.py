"""Where the stored cache is when nobody says so, and how large it may become. [no-torch]"""

from __future__ import annotations

import os
from pathlib import Path

from streaming.stored_cache.eviction import kept_models

MOST_NBYTES = 64 << 30


def default_cache_folder() -> Path:
    """The folder `stored` in FIRSTLAYER_CACHE, else in ~/.cache/firstlayer."""
    from streaming.remote.small_files import cache_folder  # with all that talks to servers: most runs do without

    return cache_folder() / "stored"


def default_limit_nbytes(folder: Path) -> int:
    """The smaller of 64 GiB and half of what is free on the folder's disk; what the cache has there counts as free."""
    above = (folder.absolute(), *folder.absolute().parents)
    there = next((path for path in above if os.path.isdir(path)), Path("/"))  # Path.is_dir fails for names too long
    try:
        status = os.statvfs(there)
    except OSError:
        return MOST_NBYTES
    kept = sum(model.nbytes for model in kept_models(folder))
    return min(MOST_NBYTES, (status.f_bavail * status.f_frsize + kept) // 2)

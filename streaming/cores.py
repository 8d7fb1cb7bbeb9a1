"""How many cores this process may use. [no-torch]"""

from __future__ import annotations

import os


def core_count() -> int:
    """Those that it is held to, else all of the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

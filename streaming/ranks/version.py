"""What both ends of a control channel must agree on: ranks of other versions may cut differently. [no-torch]"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

CHANNEL = 1  # counts changes of what the messages mean


@cache
def channel_version() -> str:
    """The program's version and the channel's."""
    try:
        found = version("firstlayer")
    except PackageNotFoundError:
        found = "(not installed)"
    return f"{found} (channel {CHANNEL})"

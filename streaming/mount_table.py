"""Which file system a path lies on, from the system's table of mounts. [no-torch]"""

from __future__ import annotations

import os
import re
from pathlib import Path

_TABLE = Path("/proc/self/mountinfo")


def file_system_of(path: Path, *, table: Path = _TABLE) -> str | None:
    """The type of the file system that holds the path ("ext4", "nfs4"); None where the system does not tell."""
    try:
        text = table.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    return find_mount(os.path.realpath(path), text)


def find_mount(path: str, table: str) -> str | None:
    """The type of the mount with the longest prefix of an absolute path; of several on one point, the last covers all.

    A line: id, parent, device, root, mount point, options, optional fields, "-", type, source, more options
    (proc(5)).
    """
    best, found = -1, None
    for line in table.splitlines():
        head, dash, tail = line.partition(" - ")
        fields = head.split()
        if not dash or len(fields) < 5 or not tail.split():
            continue
        point = _plain(fields[4])
        inside = point == "/" or path == point or path.startswith(f"{point}/")
        if inside and len(point) >= best:
            best, found = len(point), tail.split()[0]
    return found


def _plain(text: str) -> str:
    r"""Spaces, tabs, line ends and backslashes stand as \040 and the like."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)

"""How much memory a load may take: what the machine has left, or the control group, whichever is less. [no-torch]"""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/")


def available_nbytes(*, root: Path = _ROOT) -> int | None:
    """Bytes; None where the system does not tell. `root` is where /proc and /sys are found (for tests)."""
    found = [value for value in (_machine_nbytes(root), _group_nbytes(root)) if value is not None]
    return min(found, default=None)


def _machine_nbytes(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _group_nbytes(root: Path) -> int | None:
    """What is left of the control group's limit, its parents' included; file pages that can be dropped count as free.

    Version 2: memory.max and memory.current in the group's folder. Version 1: memory.limit_in_bytes and its like.
    """
    left = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            left += _left(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            left += _left(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min(left, default=None)


def _left(mount: Path, path: str, limit: str, usage: str) -> list[int]:
    own = mount / path.strip("/")
    folders = [folder for folder in (own, *own.parents) if folder.is_relative_to(mount)]
    found = []
    for folder in folders:
        most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
        if most.isdecimal() and used.isdecimal():
            found.append(max(0, int(most) - int(used) + _droppable(folder)))
    return found


def _droppable(folder: Path) -> int:
    names = ("inactive_file", "active_file")
    lines = [line.split() for line in _text(folder / "memory.stat").splitlines()]
    return sum(int(line[1]) for line in lines if len(line) == 2 and line[0] in names)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""

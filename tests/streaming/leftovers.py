"""What a model may not leave behind: processes, threads, descriptors."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

JOIN_S = 20  # a worker that has been told to end is given so long


@contextmanager
def nothing_left() -> Iterator[None]:
    """Whatever the block starts must have ended with it. Memory goes with its last user: hold no model in the block."""
    threads, children, descriptors = set(threading.enumerate()), child_processes(), open_descriptors()
    gc.freeze()  # what was there before needs no looking through: in a long run that takes longer than most tests
    try:
        yield
        gc.collect()
    finally:
        gc.unfreeze()
    left = set(threading.enumerate()) - threads
    for thread in left:  # told to end, but perhaps not gone yet
        thread.join(JOIN_S)
    alive = [thread.name for thread in left if thread.is_alive()]
    assert not alive, f"threads left: {alive}"
    processes = child_processes() - children
    assert not processes, f"processes left: {processes}"
    if _opened_since(descriptors):
        gc.collect()  # of a thread that ended after the first one
    opened = _opened_since(descriptors)
    assert not opened, f"descriptors left: {opened}"


def _opened_since(descriptors: dict[str, str]) -> dict[str, str]:
    return {name: file for name, file in open_descriptors().items() if descriptors.get(name) != file}


def child_processes() -> set[int]:
    """The children of this process, those that nobody has waited for included."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[1]) == os.getpid():
            found.add(int(stat.parent.name))
    return found


def open_descriptors() -> dict[str, str]:
    """Descriptor -> what it is open on."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the listing's own
    return found

"""Leases: who wants to write to a file waits until nobody uses its bytes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from streaming.file_leases import LOOK_S, FileLeases
from streaming.open_files import state_of
from tests.streaming.leftovers import open_descriptors


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "leased"
    found.write_bytes(bytes(1000))
    return found


@pytest.fixture
def leases(path: Path) -> Iterator[FileLeases]:
    found = FileLeases()
    with path.open("rb") as file:
        if not found.take(0, file.fileno(), state_of(os.fstat(file.fileno()))):
            pytest.skip("this system leases no file here")
    yield found
    found.close()


def cut(path: Path) -> threading.Thread:
    """Cuts the file, in a thread that waits until it may."""
    thread = threading.Thread(target=os.truncate, args=(path, 10))
    thread.start()
    return thread


def test_nobody_cuts_a_file_that_is_used(path: Path, leases: FileLeases) -> None:
    assert leases.enter(0)
    writer = cut(path)
    time.sleep(4 * LOOK_S)
    assert path.stat().st_size == 1000
    assert not leases.enter(0)  # somebody waits
    assert path.stat().st_size == 1000
    leases.leave(0)
    writer.join(timeout=10)
    assert path.stat().st_size == 10
    assert not leases.enter(0)


def test_a_file_that_nobody_uses_is_given_back_soon(path: Path, leases: FileLeases) -> None:
    before = state_of(path.stat())
    assert leases.enter(0)
    leases.leave(0)
    writer = cut(path)
    writer.join(timeout=10)
    assert not writer.is_alive()
    assert not leases.enter(0)
    with path.open("rb") as file:
        assert not leases.take(0, file.fileno(), before)  # it is another one now
    assert not leases.enter(0)


def test_a_file_that_is_open_for_writing_is_not_leased(path: Path, leases: FileLeases) -> None:
    other = path.with_name("other")
    with other.open("wb") as _, other.open("rb") as file:
        assert not leases.take(1, file.fileno(), state_of(os.fstat(file.fileno())))
    assert not leases.enter(1)
    assert not leases.enter(2)  # never taken


def test_closed_leases_leave_nothing(path: Path) -> None:
    before, threads, leases = open_descriptors(), threading.active_count(), FileLeases()
    with path.open("rb") as file:
        leases.take(0, file.fileno(), state_of(os.fstat(file.fileno())))
        leases.enter(0)
        leases.close()
        leases.leave(0)
        assert not leases.take(0, file.fileno(), state_of(os.fstat(file.fileno())))
    assert leases.is_closed
    assert open_descriptors().items() <= before.items()
    assert threading.active_count() == threads
    cut(path).join(timeout=10)
    assert path.stat().st_size == 10


def test_a_file_that_was_only_opened_is_leased_again(path: Path, leases: FileLeases) -> None:
    state = state_of(path.stat())
    with path.open("r+b"), path.open("rb") as file:
        assert not leases.enter(0)
        assert not leases.take(0, file.fileno(), state)
    with path.open("rb") as file:
        assert leases.take(0, file.fileno(), state)
    assert leases.enter(0)


def test_a_closed_lease_is_over_whoever_else_has_its_descriptor(path: Path, leases: FileLeases) -> None:
    """As a forked process has."""
    own = leases.descriptor(0)
    assert own is not None
    other = os.dup(own)
    try:
        leases.close()
        writer = cut(path)
        writer.join(timeout=10)
        assert not writer.is_alive()
    finally:
        os.close(other)

"""Several processes, and those that are killed while they write."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from streaming.stored_cache import StoredCache
from streaming.stored_cache.journal import aligned
from tests.streaming.stored_cache.units import Opened, fill, loaded, unit_of
from tests.streaming.stored_cache.writing_program import MOST_NBYTES

ROOT = Path(__file__).parents[3]


@dataclass
class Writers:
    """Processes that write, one after the other."""

    program: subprocess.Popen[str]
    pid: int = 0

    def start(self, root: Path, *, first: int) -> None:
        assert self.program.stdin
        self.program.stdin.write(f"{root} {first}\n")
        self.program.stdin.flush()
        word, self.pid = self.next()
        assert word == "pid"

    def next(self) -> tuple[str, int]:
        assert self.program.stdout
        word, number = self.program.stdout.readline().split()
        assert word in ("pid", "began", "put", "ended")
        assert (word, number) != ("began", "0")
        return word, int(number)

    def kill(self) -> list[tuple[str, int]]:
        """Kill it, now; what it had said since."""
        os.kill(self.pid, signal.SIGKILL)
        return list(iter(self.next, ("ended", 0)))


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    command = [sys.executable, "-m", "tests.streaming.stored_cache.writing_program"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        yield Writers(program)
        assert program.stdin
        program.stdin.close()


def kill_and_check(writers: Writers, root: Path, rng: random.Random, put: set[int], first: int) -> int:
    """One process that is killed at some moment; what the next finds. The number of the next unit."""
    writers.start(root, first=first)
    said = [writers.next() for _ in range(rng.randint(0, 4))]
    time.sleep(rng.random() * 0.01)  # any moment: while it opens, within a unit, between two
    put |= {number for word, number in said + writers.kill() if word == "put"}
    last = max(put, default=0)
    opened = Opened(root)
    with opened as cache:
        assert cache.is_writing
        for number in range(last + 3):
            found = loaded(cache, number, most=MOST_NBYTES)
            assert found or (found is None and number not in put)
            if found:
                put.add(number)
        ends = [cache.tensors(f"u{number}")[-1] for number in put]
        assert cache.file.stat().st_size == max((aligned(one.offset + one.nbytes) for one in ends), default=0)
        cache.put(f"u{last + 3}", unit_of(last + 3, most=MOST_NBYTES))
        put.add(last + 3)
    assert not opened.warnings
    return last + 4


def kills(writers: Writers, root: Path, count: int) -> None:
    """A new folder after every tenth: the first moments of one matter too."""
    rng = random.Random(count)
    for number in range(count):
        if number % 10 == 0:
            put, first, folder = set[int](), 0, root / str(number)
        first = kill_and_check(writers, folder, rng, put, first)


def test_a_killed_writer_leaves_nothing_that_is_trusted_and_wrong(writers: Writers, tmp_path: Path) -> None:
    kills(writers, tmp_path, 8)


@pytest.mark.slow
def test_a_writer_killed_at_50_moments_leaves_nothing_that_is_trusted_and_wrong(
    writers: Writers, tmp_path: Path
) -> None:
    kills(writers, tmp_path, 50)


def test_a_second_process_reads_what_is_committed_and_does_not_wait(writers: Writers, tmp_path: Path) -> None:
    writers.start(tmp_path, first=0)
    assert [writers.next() for _ in range(3)] == [("began", 1), ("put", 0), ("put", 1)]
    opened = Opened(tmp_path)
    with opened as cache:
        assert not cache.is_writing
        assert loaded(cache, 0, most=MOST_NBYTES)
        assert loaded(cache, 1, most=MOST_NBYTES)
        cache.put("mine", unit_of(1))
        assert not cache.holds("mine")
    assert [words.partition(": ")[2] for words in opened.warnings] == [
        "this one reads what is there and keeps nothing more"
    ]
    writers.kill()
    with Opened(tmp_path) as cache:
        assert cache.is_writing


def test_the_next_to_open_writes_when_the_writer_has_closed(tmp_path: Path) -> None:
    with Opened(tmp_path) as first, Opened(tmp_path) as second:
        assert (first.is_writing, second.is_writing) == (True, False)
        first.put("u1", unit_of(1))
        assert loaded(second, 1) is None  # what was there when it was opened
        first.close()
        with Opened(tmp_path) as third:
            assert third.is_writing
            assert loaded(third, 1)
            third.put("u2", unit_of(2))
        assert not second.holds("u2")
    with Opened(tmp_path) as cache:
        assert loaded(cache, 1)
        assert loaded(cache, 2)


def test_a_writer_that_comes_while_others_read_writes_behind_what_they_may_have_read(tmp_path: Path) -> None:
    folder = fill(tmp_path, range(3))
    with Opened(tmp_path) as holder, Opened(tmp_path) as reader:
        holder.close()
        assert all(loaded(reader, number) for number in range(3))
        lines = (folder / "journal").read_bytes().splitlines(True)
        (folder / "journal").write_bytes(lines[0] + lines[1][:20])
        with Opened(tmp_path) as writer:
            assert writer.is_writing
            assert [writer.holds(f"u{number}") for number in range(3)] == [True, False, False]
            writer.put("u9", unit_of(9))
            assert all(loaded(reader, number) for number in range(3))
    with Opened(tmp_path) as cache:
        assert [loaded(cache, number) for number in (0, 1, 2, 9)] == [True, None, None, True]


# --- who may not write


READING = """
import os, sys, tempfile
from pathlib import Path
from tests.streaming.stored_cache.units import Opened, fill, loaded, unit_of

with tempfile.TemporaryDirectory() as name:
    os.chmod(name, 0o755)
    root = Path(name) / "cache"
    folder = fill(root, range(2))
    for path in (root, folder):
        path.chmod(0o555)
    for path in folder.iterdir():
        path.chmod(0o444)
    (Path(name) / "closed").mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.seteuid(65534)
    for where, key in ((root, None), (root, {"model": "b"}), (Path(name) / "closed" / "cache", None)):
        opened = Opened(where, key=key)
        with opened as cache:
            cache.put("u7", unit_of(7))
            print(cache.is_writing, loaded(cache, 0), loaded(cache, 1), cache.holds("u7"))
        print(*(words.replace(str(opened.cache.file.parent), "F") for words in opened.warnings))
    if os.getuid() == 0:
        os.seteuid(0)
    for path in (root, folder):
        path.chmod(0o755)
"""


def test_who_may_not_write_reads_and_is_told_once() -> None:
    done = subprocess.run([sys.executable, "-c", READING], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0:2] == [
        "False True True False",
        "the stored cache F cannot be written: what is not there yet is not kept",
    ]
    nothing = "the stored cache F cannot be used (Permission denied): what is quantized is not kept on disk"
    assert lines[2:] == ["False None None False", nothing] * 2


def test_a_limit_of_the_files_size_is_like_a_full_disk(tmp_path: Path) -> None:
    program = f"""
import resource
from pathlib import Path
from tests.streaming.stored_cache.units import Opened, loaded, unit_of
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
opened = Opened(Path({str(tmp_path)!r}))
with opened as cache:
    for number in range(20):
        cache.put(f"u{{number}}", unit_of(number))
    found = [loaded(cache, number) for number in range(20)]
    print(found.count(True) > 0, found.count(False), cache.is_writing, cache.file.stat().st_size <= 100_000)
print(*(words.rpartition("(")[2] for words in opened.warnings))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["True 0 False True", "File too large): nothing more is kept"]


def test_caches_are_the_same_after_any_order_of_steps(tmp_path: Path) -> None:
    """Two openings of one model at random; what either loads is what the seed says."""
    rng, caches = random.Random(11), list[StoredCache]()
    for _ in range(300):
        if len(caches) < 2 and rng.random() < 0.2:
            caches.append(Opened(tmp_path).cache)
        elif caches and rng.random() < 0.1:
            caches.pop(rng.randrange(len(caches))).close()
        elif caches:
            cache, number = rng.choice(caches), rng.randrange(12)
            if rng.random() < 0.5:
                cache.put(f"u{number}", unit_of(number, most=2000))
            else:
                assert loaded(cache, number, most=2000) is not False
                cache.drop_behind(f"u{number}")
    for cache in caches:
        cache.close()
    with Opened(tmp_path) as cache:
        assert all(loaded(cache, number, most=2000) for number in range(12) if cache.holds(f"u{number}"))
        assert cache.nbytes > 0

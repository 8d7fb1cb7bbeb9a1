"""The data file changes while the cache is open: nothing wrong is loaded, and nothing is verified for nothing."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.write_tiny_model import TinyModel
from streaming import LLM, Hooks, SamplingParams
from streaming.stored_cache import StoredCache, data_file
from streaming.stored_cache import cache as cache_module
from tests.streaming.limits import limit_of
from tests.streaming.stored_cache.units import Opened, fill, loaded, unit_of

SEEDS = range(6)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was written was written long ago."""
    monkeypatch.setattr(data_file, "SETTLED_NS", 0)


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Offsets that were read under a checksum."""
    found: list[int] = []
    read_whole = data_file.read_whole

    def noted(descriptor: int, memory: memoryview, *, offset: int, crc: int | None) -> int | None:
        if crc is not None:
            found.append(offset)
        return read_whole(descriptor, memory, offset=offset, crc=crc)

    monkeypatch.setattr(cache_module, "read_whole", noted)
    return found


def later(path: Path) -> None:
    """Return when the clock that files get their times from has gone on since the file was changed."""
    other = path.with_name("clock")
    while True:
        other.write_bytes(b"")
        if other.stat().st_ctime_ns > path.stat().st_ctime_ns:
            other.unlink()
            return


def load_all(cache: StoredCache) -> list[bool | None]:
    return [loaded(cache, seed) for seed in SEEDS]


@pytest.mark.usefixtures("settled")
def test_in_a_file_that_stays_as_it_is_each_unit_is_verified_once(tmp_path: Path, verified: list[int]) -> None:
    fill(tmp_path, SEEDS)
    with Opened(tmp_path) as cache:
        assert load_all(cache) == [True] * 6
        offsets = [one.offset for seed in SEEDS for one in cache.tensors(f"u{seed}")]
        assert verified == offsets
        for _ in range(3):
            assert load_all(cache) == [True] * 6
        assert verified == offsets


def test_what_has_just_been_written_is_verified_each_time(tmp_path: Path, verified: list[int]) -> None:
    """A change within the same step of the clock would leave the file's times as they are."""
    fill(tmp_path, range(4))
    with Opened(tmp_path) as cache:
        assert all(loaded(cache, 3) for _ in range(2))
        offset = cache.tensors("u3")[0].offset
        assert verified == [offset, offset]


def test_opening_a_whole_file_does_not_change_it(tmp_path: Path) -> None:
    file = fill(tmp_path, SEEDS) / "data.bin"
    before = file.stat().st_ctime_ns
    later(file)
    with Opened(tmp_path) as cache:
        assert load_all(cache) == [True] * 6
    assert file.stat().st_ctime_ns == before


@pytest.mark.usefixtures("settled")
def test_after_a_put_all_are_verified_once_more(tmp_path: Path, verified: list[int]) -> None:
    fill(tmp_path, SEEDS)
    with Opened(tmp_path) as cache:
        load_all(cache)
        later(cache.file)
        cache.put("u9", unit_of(9))
        later(cache.file)
        verified.clear()
        load_all(cache)
        assert verified == [one.offset for seed in SEEDS for one in cache.tensors(f"u{seed}")]
        verified.clear()
        assert load_all(cache) == [True] * 6
        assert not verified


@pytest.mark.usefixtures("settled")
def test_after_a_put_of_another_process_all_are_verified_once_more(tmp_path: Path, verified: list[int]) -> None:
    fill(tmp_path, SEEDS)
    with Opened(tmp_path) as writer, Opened(tmp_path) as reader:
        load_all(reader)
        later(writer.file)
        writer.put("u9", unit_of(9))
        verified.clear()
        assert load_all(reader) == [True] * 6
        assert len(verified) == sum(len(reader.tensors(f"u{seed}")) for seed in SEEDS)


# --- others change it


def cut_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def zeros_instead(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


def noise_in_a_tenth(path: Path) -> None:
    status, rng = path.stat(), random.Random(3)
    with path.open("r+b") as file:
        file.seek(status.st_size // 3)
        file.write(rng.randbytes(status.st_size // 10))


def noise_under_the_old_time(path: Path) -> None:
    status = path.stat()
    noise_in_a_tenth(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


CUTS = [cut_to_nothing, cut_in_half]
OTHERS = [zeros_instead, noise_in_a_tenth, noise_under_the_old_time]
Change = Callable[[Path], None]


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("change", OTHERS)
def test_units_whose_bytes_become_others_are_found_out_and_put_anew(change: Change, tmp_path: Path) -> None:
    fill(tmp_path, SEEDS)
    opened = Opened(tmp_path)
    with opened as cache:
        load_all(cache)
        later(cache.file)
        change(cache.file)
        found = load_all(cache)
        assert False not in found
        assert None in found
        assert [cache.holds(f"u{seed}") for seed in SEEDS] == [one is True for one in found]
        for seed in SEEDS:
            cache.put(f"u{seed}", unit_of(seed))
        assert load_all(cache) == [True] * 6
    assert not opened.warnings
    with Opened(tmp_path) as cache:
        assert load_all(cache) == [True] * 6


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("change", CUTS)
@pytest.mark.parametrize("put_first", [False, True])
def test_a_file_that_is_cut_short_loses_what_was_beyond_and_is_written_no_more(
    put_first: bool, change: Change, tmp_path: Path
) -> None:
    fill(tmp_path, SEEDS)
    opened = Opened(tmp_path)
    with opened as cache:
        load_all(cache)
        stops = [cache.tensors(f"u{seed}")[-1].offset + cache.tensors(f"u{seed}")[-1].nbytes for seed in SEEDS]
        later(cache.file)
        change(cache.file)
        left = cache.file.stat().st_size
        if put_first:
            cache.put("u9", unit_of(9))
        found = load_all(cache)
        assert found == [True if stop <= left else None for stop in stops]
        cache.put("u5", unit_of(5))
        assert not cache.is_writing
        assert cache.file.stat().st_size <= left
        assert load_all(cache) == found
    (warning,) = opened.warnings
    assert warning.startswith(f"the stored cache {cache.file.parent} was cut short by somebody while it was in use (")
    assert warning.endswith(" are left): nothing more is kept")
    with Opened(tmp_path) as cache:
        assert load_all(cache) == found
        assert cache.is_writing


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("change", [*CUTS, *OTHERS])
def test_a_change_in_the_middle_of_a_read_is_found_out(
    change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a unit that was verified before; and when it is read again for its checksum the change is there."""
    fill(tmp_path, range(1))
    preadv, calls = os.preadv, list[int]()

    def read(descriptor: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            change(cache.file)
        return preadv(descriptor, buffers, offset)

    with Opened(tmp_path) as cache:
        assert loaded(cache, 0)
        later(cache.file)
        monkeypatch.setattr(os, "preadv", read)
        assert loaded(cache, 0) is None
        assert calls
        assert not cache.holds("u0")


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("change", [*CUTS, *OTHERS])
def test_a_model_that_runs_gives_the_same_tokens(
    change: Change, tiny_folder: Callable[[TinyModel], Path], tmp_path: Path
) -> None:
    folder, warnings = tiny_folder(TinyModel(layers=3, dtype="float32")), list[str]()
    options: dict[str, Any] = {"quantization": "int8_per_channel", "max_model_len": 64, "reader": "threads",
                               "cache_dir": str(tmp_path)}  # fmt: skip
    limit = limit_of(folder, 0.0, **options)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(folder, memory=limit, **options) as llm:
        expected = llm.complete([[5, 6, 7]], params)[0].token_ids
    (file,) = tmp_path.glob("*/data.bin")
    later(file)
    with LLM(folder, memory=limit, hooks=Hooks(warn=warnings.append), **options) as llm:
        found = []
        for piece in llm.pieces([[5, 6, 7]], params):
            found.append(piece.token_id)
            if len(found) == 4:
                change(file)
        assert tuple(found) == expected
    assert [words for words in warnings if "cut short" not in words] == []
    assert len(warnings) == 1 if change in CUTS else len(warnings) <= (change is zeros_instead)  # is short in between
    with LLM(folder, memory=limit, **options) as llm:
        assert llm.complete([[5, 6, 7]], params)[0].token_ids == expected

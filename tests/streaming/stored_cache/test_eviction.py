"""The limit over all models in the cache folder: which go, which stay, and where the folder is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streaming.stored_cache import place
from tests.streaming.stored_cache.units import Opened, fill, loaded, unit_of


def model(number: int) -> dict[str, object]:
    return {"model": number}


def kept(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def aged(root: Path, numbers: list[int]) -> dict[int, Path]:
    """A model of one unit for each number, opened in this order."""
    folders = {}
    for age, number in enumerate(numbers):
        folders[number] = fill(root, range(1), key=model(number))
        os.utime(folders[number] / "in_use", (1000 + age, 1000 + age))
    return folders


def test_the_least_recently_opened_go_first(tmp_path: Path) -> None:
    folders = aged(tmp_path, [3, 1, 4, 2])
    size = sum(path.stat().st_size for path in folders[1].iterdir())
    opened = Opened(tmp_path, key=model(5), limit=3 * size + 5000)
    assert kept(tmp_path) == {folders[number].name for number in (1, 4, 2)} | {opened.cache.file.parent.name}
    with opened as cache:
        cache.put("u0", unit_of(0))
        assert loaded(cache, 0)
    assert kept(tmp_path) == {folders[number].name for number in (4, 2)} | {opened.cache.file.parent.name}
    assert not opened.warnings
    Opened(tmp_path, key=model(4)).cache.close()  # is the most recent one now
    with Opened(tmp_path, key=model(6), limit=3 * size + 5000) as cache:
        cache.put("u0", unit_of(0))
    assert folders[4].exists()
    assert not folders[2].exists()


def test_one_that_somebody_has_open_stays_and_what_does_not_fit_is_told_once(tmp_path: Path) -> None:
    folders = aged(tmp_path, [1, 2])
    limit = sum(path.stat().st_size for folder in folders.values() for path in folder.iterdir()) + 6000
    with Opened(tmp_path, key=model(1)) as first, Opened(tmp_path, key=model(2)) as second:
        opened = Opened(tmp_path, key=model(3), limit=limit)
        with opened as cache:
            size = cache.file.stat().st_size
            cache.put("u0", unit_of(0))
            cache.put("u1", unit_of(1))
            assert not cache.holds("u0")
            assert not cache.is_writing
            assert cache.file.stat().st_size == size
        (warning,) = opened.warnings
        assert warning.startswith(f"the stored cache {tmp_path} is full: a unit of ")
        assert warning.endswith(" KiB (--cache-size): nothing more is kept")
        assert loaded(first, 0)
        assert loaded(second, 0)


def test_a_model_that_is_larger_than_the_limit_is_still_read(tmp_path: Path) -> None:
    fill(tmp_path, range(3))
    opened = Opened(tmp_path, limit=5000)
    with opened as cache:
        cache.put("u9", unit_of(9))
        assert all(loaded(cache, number) for number in range(3))
        assert not cache.holds("u9")
    assert len(opened.warnings) == 1


def test_a_process_keeps_what_is_removed_under_it(tmp_path: Path) -> None:
    folder = fill(tmp_path, range(2))
    with Opened(tmp_path) as cache:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        assert loaded(cache, 0)
        cache.put("u2", unit_of(2))
        assert loaded(cache, 2)
        with Opened(tmp_path) as new:
            assert new.is_writing
            assert not new.holds("u0")
            assert loaded(cache, 1)


def test_what_was_half_removed_goes_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    folder = fill(tmp_path, range(1), key=model(1))
    leaving = tmp_path / f"leaving-{folder.name}-77"
    folder.rename(leaving)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "data.bin").write_bytes(bytes(1 << 20))
    other = fill(tmp_path, range(1), key=model(2))
    (other / "letter").write_bytes(b"dear")
    with Opened(tmp_path, key=model(3), limit=1000):
        assert not leaving.exists()
        assert not other.exists()
    assert (tmp_path / "notes" / "data.bin").exists()
    (left,) = tmp_path.glob("leaving-*/*")
    assert left.read_bytes() == b"dear"


def test_the_default_limit_is_half_of_what_would_be_free_without_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 100_000_000

    def status(path: object) -> os.statvfs_result:
        assert Path(str(path)).is_dir()
        return os.statvfs_result((4096, 1000, 0, 0, free // 1000, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", status)
    assert place.default_limit_nbytes(tmp_path / "not" / "there") == free // 2
    folder = fill(tmp_path, range(2))
    kept_nbytes = sum(path.stat().st_size for path in folder.iterdir())
    assert place.default_limit_nbytes(tmp_path) == (free + kept_nbytes) // 2
    free = 1 << 40
    assert place.default_limit_nbytes(tmp_path) == 64 << 30


def test_the_folder_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRSTLAYER_CACHE", "/somewhere")
    assert place.default_cache_folder() == Path("/somewhere/stored")
    monkeypatch.delenv("FIRSTLAYER_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert place.default_cache_folder() == Path("/home/somebody/.cache/firstlayer/stored")

"""What is put is loaded, to the bit, in this process and the next."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest
import torch

from streaming.errors import CheckpointError
from streaming.stored_cache import cache as cache_module
from streaming.stored_cache import data_file
from streaming.stored_cache.key import THIS_RUN
from tests.streaming.stored_cache.units import KEY, LIMIT, Opened, empty_like, fill, loaded, same, unit_of


def test_what_is_put_is_loaded_at_once_and_by_the_next_process(tmp_path: Path) -> None:
    with Opened(tmp_path) as cache:
        assert not cache.holds("u1")
        assert loaded(cache, 1) is None
        cache.put("u1", unit_of(1))
        assert cache.holds("u1")
        assert loaded(cache, 1)
        assert cache.written_nbytes == cache.nbytes == sum(one.nbytes for one in unit_of(1).values())
    with Opened(tmp_path) as cache:
        assert loaded(cache, 1)
        assert (cache.written_nbytes, cache.nbytes) == (0, sum(one.nbytes for one in unit_of(1).values()))


def test_places_in_the_file_are_as_promised(tmp_path: Path) -> None:
    with Opened(tmp_path) as cache:
        for seed in range(8):
            cache.put(f"u{seed}", unit_of(seed))
        data = cache.file.read_bytes()
        assert len(data) % 4096 == 0
        for seed in range(8):
            tensors = cache.tensors(f"u{seed}")
            assert tensors[0].offset % 4096 == 0
            for one in tensors:
                made = unit_of(seed)[one.name]
                assert one.offset % 64 == 0
                assert one.shape == tuple(made.shape)
                there = data[one.offset : one.offset + one.nbytes]
                assert there == made.contiguous().view(torch.uint8).numpy().tobytes()
        assert cache.tensors("other") == ()


def test_names_of_dtypes_are_those_of_safetensors(tmp_path: Path) -> None:
    kinds = {
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.float8_e8m0fnu,
        "BF16": torch.bfloat16,
        "I32": torch.int32,
    }
    with Opened(tmp_path) as cache:
        cache.put("u", {name: torch.zeros(3, dtype=kind) for name, kind in kinds.items()})
        assert [one.dtype for one in cache.tensors("u")] == list(kinds)


def test_numbers_without_elements_and_views_are_kept(tmp_path: Path) -> None:
    tensors = {"none": torch.empty(0, 4), "one": torch.tensor(3.0), "turned": torch.arange(12.0).view(3, 4).t()}
    with Opened(tmp_path) as cache:
        cache.put("u", tensors)
        into = {name: torch.empty(one.shape) for name, one in tensors.items()}
        assert cache.load("u", into)
    assert all(torch.equal(into[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("size", [9, 16, 17])
def test_large_tensors_go_in_pieces(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_file, "PIECE_NBYTES", 8)
    tensors = {"weight": torch.arange(size, dtype=torch.uint8), "weight_scale": torch.arange(size).float()}
    with Opened(tmp_path) as cache:
        cache.put("u", tensors)
        into = empty_like(tensors)
        assert cache.load("u", into)
        assert same(into, tensors)


def test_another_name_dtype_or_shape_is_not_loaded_and_the_unit_forgotten(tmp_path: Path) -> None:
    made = {"weight": torch.arange(12, dtype=torch.int8).view(3, 4)}
    others: list[dict[str, torch.Tensor]] = [
        {"weight": torch.empty(4, 3, dtype=torch.int8)}, {"weight": torch.empty(3, 4, dtype=torch.uint8)},
        {"weights": torch.empty(3, 4, dtype=torch.int8)}, {},
        {"weight": torch.empty(3, 4, dtype=torch.int8), "more": torch.empty(1)},
    ]  # fmt: skip
    with Opened(tmp_path) as cache:
        for other in others:
            cache.put("u", made)
            assert not cache.load("u", other)
            assert not cache.holds("u")
        cache.put("u", made)
        into = empty_like(made)
        assert cache.load("u", into)
        assert same(into, made)


def test_a_unit_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    with Opened(tmp_path) as cache:
        cache.put("u1", unit_of(1))
        cache.put("u1", unit_of(2))
        assert loaded(cache, 1)


def test_what_no_cache_can_hold_is_the_callers_mistake(tmp_path: Path) -> None:
    with Opened(tmp_path) as cache:
        with pytest.raises(ValueError, match="cannot be kept"):
            cache.put("u", {})
        with pytest.raises(ValueError, match="cannot be kept"):
            cache.put("u" * 2000, unit_of(1))
        with pytest.raises(ValueError, match="row after row"):
            cache.load("u", {"weight": torch.empty(4, 3).t()})
        cache.put("u1", unit_of(1))
        assert loaded(cache, 1)


def test_several_threads_put_and_load_at_once(tmp_path: Path) -> None:
    faults: list[int] = []

    def work(first: int) -> None:
        for seed in (*range(first, 24), *range(first)):
            cache.put(f"u{seed}", unit_of(seed))
            if loaded(cache, seed) is False:
                faults.append(seed)

    with Opened(tmp_path) as cache:
        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 6, 12, 18)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not faults
        assert all(loaded(cache, seed) for seed in range(24))
        assert cache.written_nbytes == cache.nbytes
    with Opened(tmp_path) as cache:
        assert all(loaded(cache, seed) for seed in range(24))


def test_after_close_nothing_is_there_and_nothing_fails(tmp_path: Path) -> None:
    with Opened(tmp_path) as cache:
        cache.put("u1", unit_of(1))
    cache.close()
    cache.put("u2", unit_of(2))
    cache.drop_behind("u1")
    assert loaded(cache, 1) is None
    assert not cache.holds("u1")
    with Opened(tmp_path) as cache:
        assert loaded(cache, 1)
        assert not cache.holds("u2")


def test_closing_waits_for_a_load_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, range(1))
    begun, go_on, order = threading.Event(), threading.Event(), list[str]()
    preadv = os.preadv

    def held(*arguments: object) -> int:
        begun.set()
        assert go_on.wait(10)
        return preadv(*arguments)  # type: ignore[arg-type]

    cache = Opened(tmp_path).cache
    monkeypatch.setattr(os, "preadv", held)
    reading = threading.Thread(target=lambda: order.append(f"loaded {loaded(cache, 0)}"))
    reading.start()
    assert begun.wait(10)
    ending = threading.Thread(target=cache.close)
    ending.start()
    ending.join(0.1)
    assert ending.is_alive()
    go_on.set()
    reading.join()
    ending.join()
    assert order == ["loaded True"]
    assert not cache.holds("u0")


def test_units_whose_bytes_changed_are_forgotten_and_put_again(tmp_path: Path) -> None:
    folder = fill(tmp_path, range(3))
    with (folder / "data.bin").open("r+b") as file:
        file.write(b"\x55" * 8)
    with Opened(tmp_path) as cache:
        assert loaded(cache, 0) is None
        assert not cache.holds("u0")
        cache.put("u0", unit_of(0))
        assert loaded(cache, 0)
    with Opened(tmp_path) as cache:
        assert [loaded(cache, seed) for seed in range(3)] == [True, True, True]


def test_bytes_are_dropped_once_they_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def advise(fd: int, at: int, size: int, advice: int) -> None:
        if advice == os.POSIX_FADV_DONTNEED:
            calls.append(f"drop {at} {size}")

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(os, "fdatasync", lambda fd: calls.append("sync"))
    monkeypatch.setattr(cache_module, "SYNC_NBYTES", 3000)
    unit = {"weight": torch.zeros(1000, dtype=torch.int8)}
    with Opened(tmp_path) as cache:
        cache.put("a", unit)
        cache.drop_behind("a")
        cache.put("b", unit)
        cache.put("c", unit)
        assert calls == ["drop 0 1000", "sync", "drop 0 1000"]
        cache.drop_behind("b")
        cache.drop_behind("none")
        assert calls[3:] == ["drop 4096 1000"]
        cache.put("d", unit)
    assert calls[4:] == ["sync"]


# --- writing that fails


def test_a_full_disk_ends_writing_with_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, pwrite = Opened(tmp_path), os.pwrite
    with opened as cache:
        cache.put("u0", unit_of(0))
        size = cache.file.stat().st_size

        def full(descriptor: int, data: memoryview, offset: int) -> int:
            if offset > size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return pwrite(descriptor, data[:1000], offset)

        monkeypatch.setattr(os, "pwrite", full)
        cache.put("u1", unit_of(1))
        cache.put("u2", unit_of(2))
        assert not cache.is_writing
        assert not cache.holds("u1")
        assert cache.file.stat().st_size == size
        assert loaded(cache, 0)
    words = f"the stored cache {cache.file.parent} cannot be written (No space left on device): nothing more is kept"
    assert opened.warnings == [words]
    monkeypatch.undo()
    with Opened(tmp_path) as cache:
        cache.put("u1", unit_of(1))
        assert loaded(cache, 0)
        assert loaded(cache, 1)


@pytest.mark.parametrize("taken", [0, 10])
def test_a_journal_line_that_is_not_taken_whole_leaves_no_trace(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def short(descriptor: int, data: bytes) -> int:
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:taken])

    opened = Opened(tmp_path)
    with opened as cache:
        cache.put("u0", unit_of(0))
        monkeypatch.setattr(os, "write", short)
        cache.put("u1", unit_of(1))
        monkeypatch.undo()
        assert (cache.file.parent / "journal").read_bytes().count(b"\n") == 1
        assert cache.file.stat().st_size == -(-cache.tensors("u0")[-1].offset // 4096) * 4096
    assert len(opened.warnings) == 1
    with Opened(tmp_path) as cache:
        assert loaded(cache, 0)
        assert loaded(cache, 1) is None


def test_a_sync_that_fails_at_the_end_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    opened = Opened(tmp_path)
    monkeypatch.setattr(os, "fdatasync", fail)
    with opened as cache:
        cache.put("u0", unit_of(0))
    assert [words.partition("(")[2] for words in opened.warnings] == ["Input/output error): nothing more is kept"]


def test_a_disk_that_cannot_be_read_gives_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, range(1))

    def fail(*arguments: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Opened(tmp_path) as cache:
        monkeypatch.setattr(os, "preadv", fail)
        assert loaded(cache, 0) is None


def test_a_journal_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "MOST_JOURNAL_NBYTES", 200)
    opened = Opened(tmp_path)
    with opened as cache:
        cache.put("u0", unit_of(0))
        cache.put("u1", unit_of(1))
    assert [words.partition(" has ")[2] for words in opened.warnings] == [
        "a journal of 146 B, which is the most: nothing more is kept"
    ]


# --- keys


def test_another_key_has_another_folder(tmp_path: Path) -> None:
    assert fill(tmp_path, range(1)) != fill(tmp_path, range(1), key={"model": "b"})
    with Opened(tmp_path, key={"model": "c"}) as cache:
        assert not cache.holds("u0")
    assert json.loads((cache.file.parent / "key.json").read_text()) == {"model": "c"}


def test_the_order_of_a_key_does_not_matter(tmp_path: Path) -> None:
    fill(tmp_path, range(1), key={"a": 1, "b": [2]})
    with Opened(tmp_path, key={"b": [2], "a": 1}) as cache:
        assert loaded(cache, 0)


def test_what_is_of_this_run_only_goes_with_it(tmp_path: Path) -> None:
    opened = Opened(tmp_path, key={**KEY, THIS_RUN: "x"})
    with opened as cache:
        cache.put("u0", unit_of(0))
        assert loaded(cache, 0)
        folder = cache.file.parent
        assert folder.is_dir()
    assert not folder.exists()
    assert not opened.warnings


def test_a_limit_of_nothing_touches_no_disk(tmp_path: Path) -> None:
    opened = Opened(tmp_path / "cache", limit=0)
    with opened as cache:
        cache.put("u0", unit_of(0))
        assert not cache.holds("u0")
        assert not cache.is_writing
    assert not (tmp_path / "cache").exists()
    assert not opened.warnings


def test_the_limit_is_said(tmp_path: Path) -> None:
    with Opened(tmp_path) as cache:
        assert cache.limit_nbytes == LIMIT


def test_what_is_read_past_the_page_cache_is_checked_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    monkeypatch.setattr(cache_module, "is_cached", lambda descriptor, offset, nbytes: False)
    monkeypatch.setattr("streaming.past_cache.BUFFER_NBYTES", 8192)
    chance = random.Random(3)
    units = {
        f"u{number}": {
            name: torch.tensor(list(chance.randbytes(chance.randint(1, 30_000))), dtype=torch.uint8)
            for name in ("weight", "weight_scale", "empty")[: 1 + number % 2]
        }
        for number in range(6)
    }
    with Opened(tmp_path) as cache:
        for name, tensors in units.items():
            cache.put(name, tensors)
        for _ in range(2):  # right behind the writes, and once more
            for name, tensors in units.items():
                found = {one: torch.zeros_like(tensor) for one, tensor in tensors.items()}
                assert cache.load(name, found, past=True)
                assert all(torch.equal(found[one], tensors[one]) for one in tensors)
        at = cache.tensors("u3")[0].offset
        with cache.file.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        found = {one: torch.zeros_like(tensor) for one, tensor in units["u3"].items()}
        assert cache.load("u3", found, past=True) is False


def none() -> None:
    """What nobody waits for."""


def test_what_was_verified_is_viewed_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_file, "SETTLED_NS", 0)
    units = range(4)
    fill(tmp_path, units)
    with Opened(tmp_path) as cache:
        assert cache.view("u1", unit_of(1), before=none) is None  # not verified yet
        for seed in units:
            assert loaded(cache, seed)
            views = cache.view(f"u{seed}", unit_of(seed), before=none)
            if views is None:
                pytest.skip("this file system does not say what is in the page cache")
            for name, tensor in unit_of(seed).items():
                views[name].enter()
                assert views[name].memory.data_ptr() % 64 == 0
                assert bytes(views[name].memory.numpy()) == tensor.contiguous().view(torch.uint8).numpy().tobytes()
        assert cache.view("u1", {"weight": unit_of(1)["weight"]}, before=none) is None  # of another kind
        cache.put("other", unit_of(7))  # which changes the file, and nothing of the unit
        views["weight"].enter()
        assert cache.view("u3", unit_of(3), before=none) is None
        assert loaded(cache, 3)
        assert cache.view("u3", unit_of(3), before=none) is not None
    assert cache.view("u3", unit_of(3), before=none) is None
    views["weight"].enter()  # nobody computes any more


@pytest.mark.parametrize("cut", [True, False])
def test_a_view_whose_bytes_were_changed_is_told(cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_file, "SETTLED_NS", 0)
    fill(tmp_path, range(2))
    with Opened(tmp_path) as cache:
        assert loaded(cache, 1)
        views = cache.view("u1", unit_of(1), before=none)
        if views is None:
            pytest.skip("this file system does not say what is in the page cache")
        (place, *_) = cache.tensors("u1")
        if cut:
            os.truncate(cache.file, place.offset)
        else:
            with cache.file.open("r+b") as file:
                file.seek(place.offset + 5)
                file.write(b"other")
        with pytest.raises(CheckpointError, match=r"was changed by somebody while u1 was used where it lies in it"):
            views["weight"].enter()

"""Whatever the folder holds: nothing wrong is loaded, nothing fails, nothing is read that is not in the file."""

from __future__ import annotations

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from streaming.stored_cache import StoredCache
from tests.streaming.stored_cache.units import Opened, fill, loaded, unit_of

SEEDS = range(4)
SMALL = 400


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with four small units; it is copied, never changed."""
    return fill(tmp_path_factory.mktemp("whole"), SEEDS, most=SMALL)


def outcomes(folder: Path) -> list[bool | None]:
    """What each unit comes as; afterwards all are put again and must be there, now and for who comes next."""
    opened = Opened(folder.parent)
    with opened as cache:
        found = [loaded(cache, seed, most=SMALL) for seed in SEEDS]
        assert cache.is_writing
        assert not opened.warnings
        _put_all(cache)
    with Opened(folder.parent) as cache:
        assert [loaded(cache, seed, most=SMALL) for seed in SEEDS] == [True] * len(SEEDS)
    return found


def _put_all(cache: StoredCache) -> None:
    for seed in SEEDS:
        cache.put(f"u{seed}", unit_of(seed, most=SMALL))


def damaged(whole: Path, root: Path, name: str, data: bytes | None = None) -> Path:
    """A copy of the folder, one of whose files holds this instead, where anything is given."""
    folder = root / whole.name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    if data is not None:
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("name", ["journal", "data.bin", "key.json"])
def test_a_file_that_is_cut_short_anywhere_costs_the_units_behind(name: str, whole: Path, tmp_path: Path) -> None:
    rng, data = random.Random(name), (whole / name).read_bytes()
    size = len(data)
    for stop in sorted({0, 1, size - 1, *(rng.randrange(size) for _ in range(40))}):
        found = outcomes(damaged(whole, tmp_path, name, data[:stop]))
        good = found.count(True)
        assert found == [True] * good + [None] * (len(SEEDS) - good)
        assert name == "data.bin" or good < len(SEEDS)


@pytest.mark.parametrize("name", ["journal", "data.bin", "key.json"])
def test_a_byte_that_is_another_anywhere_gives_no_wrong_number(name: str, whole: Path, tmp_path: Path) -> None:
    rng, data = random.Random(name), (whole / name).read_bytes()
    size = len(data)
    for at in sorted({0, size - 1, *(rng.randrange(size) for _ in range(60))}):
        bit = 1 << rng.randrange(8)
        found = outcomes(damaged(whole, tmp_path, name, data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]))
        assert False not in found
        assert name == "data.bin" or None in found


def test_runs_of_zeros_and_noise_give_no_wrong_number(whole: Path, tmp_path: Path) -> None:
    rng = random.Random(5)
    for _ in range(40):
        name = rng.choice(["journal", "data.bin"])
        data = (whole / name).read_bytes()
        size = len(data)
        at, length = rng.randrange(size), rng.randrange(1, size)
        noise = bytes(length) if rng.random() < 0.5 else rng.randbytes(length)
        found = outcomes(damaged(whole, tmp_path, name, data[:at] + noise + data[at + len(noise) :]))
        assert False not in found


def test_what_stands_behind_the_last_unit_is_cut_off(whole: Path, tmp_path: Path) -> None:
    size, lines = (whole / "data.bin").stat().st_size, (whole / "journal").read_bytes()
    folder = damaged(whole, tmp_path, "data.bin", (whole / "data.bin").read_bytes() + bytes(100_000))
    (folder / "journal").write_bytes(lines + lines[:-9])
    with Opened(tmp_path) as cache:
        assert cache.file.stat().st_size == size
        assert (folder / "journal").read_bytes() == lines + lines[: len(lines) - len(lines.splitlines(True)[-1])]
        assert all(loaded(cache, seed, most=SMALL) for seed in SEEDS)


def test_nothing_is_cut_off_while_another_reads(whole: Path, tmp_path: Path) -> None:
    folder = damaged(whole, tmp_path, "data.bin")
    lines = (folder / "journal").read_bytes().splitlines(True)
    first = Opened(tmp_path)
    with first as reading:  # it has the writer's lock, too; of the second one's view only the units are of interest
        (folder / "journal").write_bytes(lines[0])
        with Opened(tmp_path) as other:
            assert [loaded(other, seed, most=SMALL) for seed in SEEDS] == [True, None, None, None]
        assert all(loaded(reading, seed, most=SMALL) for seed in SEEDS)


# --- lines that a stranger made, with the right number in front


def line(folder: Path, body: bytes) -> bytes:
    """A line as the cache would write it, whatever it says."""
    return b"%08x %s\n" % (zlib.crc32(body, zlib.crc32(folder.name.encode())), body)


def entry(**changes: object) -> dict[str, object]:
    """What a line says of unit u0, which is a weight of 16 bytes."""
    return {"unit": "u0", "checksum": 0, "tensors": [["weight", "I8", [4, 4], 0, 16]]} | changes


HOSTILE: list[object] = [
    entry(tensors=[["weight", "I8", [4, 4], -4096, 16]]), entry(tensors=[["weight", "I8", [4, 4], 1 << 62, 16]]),
    entry(tensors=[["weight", "I8", [4, 4], 10**300, 16]]), entry(tensors=[["weight", "I8", [4, 4], 0, 10**300]]),
    entry(tensors=[["weight", "I8", [1 << 40, 1 << 40], 0, 1 << 80]]),
    entry(tensors=[["weight", "I8", [4, 4], 64, 16]]), entry(tensors=[["weight", "I8", [4, 4], 1, 16]]),
    entry(tensors=[["weight", "I8", [4, 4], 0.0, 16]]), entry(tensors=[["weight", "F4", [4, 4], 0, 16]]),
    entry(tensors=[["weight", "I8", [4, 4], True, 16]]), entry(tensors=[["weight", "I8", [-4, -4], 0, 16]]),
    entry(tensors=[["weight", "I8", [4, 4], 0, 17]]), entry(tensors=[["weight", "I9", [4, 4], 0, 16]]),
    entry(tensors=[["weight", [], [4, 4], 0, 16]]), entry(tensors=[["weight", "I8", "44", 0, 16]]),
    entry(tensors=[["weight", "I8", [4, 4], 0]]), entry(tensors=[[]]), entry(tensors=[]), entry(tensors={}),
    entry(tensors="weight"), entry(tensors=[["weight", "I8", [1] * 9, 0, 1]]), entry(tensors=[["", "I8", [4], 0, 4]]),
    entry(tensors=[["weight", "I8", [4, 4], 0, 16]] * 2),
    entry(tensors=[["weight", "I8", [0], 4096, 0], ["a", "I8", [4], 0, 4]]),
    entry(tensors=[[f"w{number}", "I8", [0], 0, 0] for number in range(65)]), entry(unit=3), entry(unit=""),
    entry(unit="u" * 1001), entry(checksum="0"), entry(checksum=None), [], None, 3, "u0", {}, {"unit": "u0"},
]  # fmt: skip


@pytest.mark.parametrize("said", HOSTILE, ids=range(len(HOSTILE)))
def test_a_line_that_says_what_cannot_be_is_none(said: object, whole: Path, tmp_path: Path) -> None:
    folder = damaged(whole, tmp_path, "journal", b"")
    (folder / "journal").write_bytes(line(folder, json.dumps(said).encode()))
    assert outcomes(folder) == [None] * len(SEEDS)


@pytest.mark.parametrize(
    "body",
    [b"", b"not json", b"\xff\xfe", b"[" * 60_000, b'{"unit": NaN}', b"9" * 50_000, b"{" * 70_000, b"\0" * 5000],
    ids=["empty", "words", "no text", "deep", "nan", "digits", "too long", "zeros"],
)
def test_a_line_that_is_no_json_is_none(body: bytes, whole: Path, tmp_path: Path) -> None:
    folder = damaged(whole, tmp_path, "journal", b"")
    (folder / "journal").write_bytes(line(folder, body))
    assert outcomes(folder) == [None] * len(SEEDS)


def test_a_sound_line_of_other_bytes_is_found_out_by_its_checksum(whole: Path, tmp_path: Path) -> None:
    folder = damaged(whole, tmp_path, "journal")
    lines = [json.loads(text[9:]) for text in (folder / "journal").read_bytes().splitlines()]
    lines[1]["tensors"][0][3] = 0  # where the first unit lies
    (folder / "journal").write_bytes(b"".join(line(folder, json.dumps(said).encode()) for said in lines))
    assert outcomes(folder) == [True, None, True, True]


def test_lines_of_another_model_are_none(whole: Path, tmp_path: Path) -> None:
    other = fill(tmp_path / "other", SEEDS, key={"model": "b"}, most=SMALL)
    folder = damaged(whole, tmp_path, "journal", (other / "journal").read_bytes())
    assert outcomes(folder) == [None] * len(SEEDS)


def test_a_folder_of_another_model_is_begun_anew(whole: Path, tmp_path: Path) -> None:
    folder = damaged(whole, tmp_path, "key.json", b'{"model": "b"}')
    assert outcomes(folder) == [None] * len(SEEDS)
    assert json.loads((folder / "key.json").read_bytes()) == {"model": "a"}


def test_an_endless_journal_is_read_to_a_limit(whole: Path, tmp_path: Path) -> None:
    folder = damaged(whole, tmp_path, "journal")
    os.truncate(folder / "journal", 1 << 40)  # zeros, of which the disk holds none
    assert outcomes(folder) == [True] * len(SEEDS)


def test_an_endless_data_file_is_cut(whole: Path, tmp_path: Path) -> None:
    folder = damaged(whole, tmp_path, "data.bin")
    os.truncate(folder / "data.bin", 1 << 40)
    assert outcomes(folder) == [True] * len(SEEDS)
    assert (folder / "data.bin").stat().st_size == (whole / "data.bin").stat().st_size


# --- what is no plain file or folder


def unusable(root: Path) -> str:
    """The one warning of a cache that cannot be used, and takes and gives nothing."""
    opened = Opened(root)
    with opened as cache:
        _put_all(cache)
        assert [loaded(cache, seed, most=SMALL) for seed in SEEDS] == [None] * len(SEEDS)
        assert not cache.is_writing
        assert (cache.nbytes, cache.written_nbytes) == (0, 0)
    (warning,) = opened.warnings
    return warning


@pytest.mark.parametrize("name", ["data.bin", "journal", "in_use", "writer", "key.json"])
def test_links_are_not_followed_and_pipes_not_waited_for(name: str, whole: Path, tmp_path: Path) -> None:
    private = tmp_path / "private"
    makers: list[Callable[[Path], object]] = [
        lambda path: path.symlink_to(private), lambda path: path.hardlink_to(private), os.mkfifo, os.mkdir
    ]  # fmt: skip
    for make in makers:
        private.write_bytes(b"of no cache")
        folder = damaged(whole, tmp_path / "cache", name)
        (folder / name).unlink()
        make(folder / name)
        opened = Opened(folder.parent)
        with opened as cache:
            assert all(loaded(cache, seed, most=SMALL) is not False for seed in SEEDS)
            _put_all(cache)
        assert private.read_bytes() == b"of no cache"
        assert all("stored cache" in words for words in opened.warnings)


def test_a_link_in_place_of_the_models_folder_is_not_followed(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "elsewhere")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / whole.name).symlink_to(tmp_path / "elsewhere")
    assert "cannot be used" in unusable(tmp_path / "cache")
    assert (tmp_path / "elsewhere" / "journal").read_bytes() == (whole / "journal").read_bytes()


def test_a_file_where_a_folder_is_needed_is_one_warning(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    assert unusable(tmp_path / "file").endswith("(File exists): what is quantized is not kept on disk")
    assert unusable(tmp_path / "file" / "deeper").endswith("(Not a directory): what is quantized is not kept on disk")
    (tmp_path / whole.name).write_bytes(b"x")
    assert unusable(tmp_path).endswith("(File exists): what is quantized is not kept on disk")


def test_a_name_that_no_folder_can_have_is_one_warning(tmp_path: Path) -> None:
    assert "cannot be used" in unusable(Path(f"{tmp_path}/a\0b"))
    assert "File name too long" in unusable(tmp_path / ("n" * 300))

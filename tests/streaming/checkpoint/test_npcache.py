"""The cache of raw arrays: written once, found again, never half, never stale, never by two at once."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import streaming
from streaming.checkpoint import Checkpoint, open_checkpoint
from streaming.errors import CheckpointError
from tests.streaming.checkpoint.build import write_folder

ROOT = Path(streaming.__file__).parent.parent


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    base = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed))
    return {
        "whole": base, "tied": base, "transposed": base.t(), "columns": base[:, 2:4], "half": base[0].bfloat16(),
        "scalar": torch.tensor(1.5), "scalar view": torch.arange(4.0)[2], "empty": torch.zeros(0, 3),
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = write_folder(tmp_path / "model", {})
    torch.save(tensors(), root / "pytorch_model.bin")
    return root


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(folder, load_format="npcache")


def caches(folder: Path) -> list[Path]:
    """What the cache's folder holds but for its lock."""
    found = folder / ".npcache"
    return sorted(path for path in found.iterdir() if path.name != "lock") if found.is_dir() else []


def check(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    (cache,) = caches(folder)
    found = load_file(cache)
    assert found.keys() == expected.keys()
    assert all(found[name].equal(tensor) and found[name].dtype is tensor.dtype for name, tensor in expected.items())


def test_the_first_load_writes_the_arrays_and_the_next_finds_them(folder: Path) -> None:
    first = opened(folder)
    (cache,) = caches(folder)
    assert (first.format, first.files, first.notes) == ("npcache", (cache,), ())
    assert all(info.is_plain and info.file == cache for info in first.tensors.values())
    check(folder, tensors())
    before = cache.stat()
    assert opened(folder) == first
    assert cache.stat() == before


def test_one_file_has_a_cache_of_its_own(folder: Path) -> None:
    found = opened(folder / "pytorch_model.bin")
    assert found.root == folder / "pytorch_model.bin"
    check(folder, tensors())


def test_only_bin_files_are_taken(folder: Path) -> None:
    (folder / "pytorch_model.bin").rename(folder / "model.pt")
    with pytest.raises(CheckpointError, match=r"no weights; looked for \*\.bin; found only model\.pt"):
        opened(folder)
    with pytest.raises(CheckpointError, match=r"format npcache reads; its name should end in \.bin"):
        opened(folder / "model.pt")
    assert not (folder / ".npcache").exists()


@pytest.mark.parametrize("change", ["size", "time"])
def test_a_changed_file_is_not_served_from_its_old_cache(change: str, folder: Path) -> None:
    opened(folder)
    path = folder / "pytorch_model.bin"
    content = tensors(seed=1) | ({"more": torch.ones(3)} if change == "size" else {})
    torch.save(content, path)
    if change == "time":
        os.utime(path, ns=(1, 1))
    opened(folder)
    check(folder, content)  # and the old one is gone


def test_a_cache_that_was_damaged_is_written_again(folder: Path) -> None:
    opened(folder)
    (cache,) = caches(folder)
    cache.write_bytes(cache.read_bytes()[:-1])
    opened(folder)
    check(folder, tensors())


def test_a_cache_of_other_tensors_is_written_again(folder: Path) -> None:
    opened(folder)
    (cache,) = caches(folder)
    write_folder(folder / "other", {"model.safetensors": {"x": tensors()["whole"].numpy()}})
    shutil.copy(folder / "other" / "model.safetensors", cache)
    opened(folder)
    check(folder, tensors())


def test_what_a_killed_writer_left_is_removed(folder: Path) -> None:
    opened(folder)
    (cache,) = caches(folder)
    cache.rename(cache.with_name(cache.name + ".unfinished"))
    opened(folder)
    check(folder, tensors())


def test_while_another_process_writes_the_bin_files_are_read(folder: Path) -> None:
    (folder / ".npcache").mkdir()
    with open(folder / ".npcache" / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = opened(folder)
    assert found.files == (folder / "pytorch_model.bin",)
    assert len(found.notes) == 1
    assert "another process writes the cache" in found.notes[0]
    assert caches(folder) == []
    opened(folder)
    check(folder, tensors())


def test_processes_that_start_at_once_all_open_it(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", {})
    content = {"x": torch.ones(300, 400)}
    torch.save(content, folder / "pytorch_model.bin")
    program = (
        "import sys\n"
        "from streaming.checkpoint import open_checkpoint\n"
        "sys.exit(list(open_checkpoint(sys.argv[1], load_format='npcache').tensors) != ['x'])\n"
    )
    started = [subprocess.Popen([sys.executable, "-c", program, str(folder)], cwd=ROOT) for _ in range(3)]
    assert [process.wait() for process in started] == [0, 0, 0]
    check(folder, content)


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_may_not_grow_leaves_nothing(folder: Path) -> None:
    with (
        file_size_limit(700),
        pytest.raises(CheckpointError, match=r"cannot be written: File too large \(it needs") as caught,
    ):
        opened(folder)
    assert len(caught.value.problems) == 1
    assert caches(folder) == []
    opened(folder)
    check(folder, tensors())


def test_a_full_disk_is_said_in_one_line_and_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)  # where a delayed allocation fails
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        opened(folder)
    assert "--load-format hf needs none" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caches(folder) == []


def test_few_numbers_that_are_repeated_without_end_do_not_fill_the_disk(folder: Path) -> None:
    """Each tensor may repeat some; a thousand of them are a file of 100 KB that would be written as 16 GB."""
    repeated = {f"layer {i}": torch.zeros(1).expand(1 << 22) for i in range(5)}
    torch.save(repeated, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"would take 83,886,080 bytes .* --load-format hf needs none") as caught:
        opened(folder)
    assert str(folder) in str(caught.value)
    assert caches(folder) == []


def test_a_folder_that_cannot_be_written_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_args: Any, **_options: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "mkdir", denied)
    with pytest.raises(CheckpointError, match=r"\.npcache: the cache .* cannot be written: Permission denied"):
        opened(folder)


def test_a_file_where_the_caches_folder_should_be(folder: Path) -> None:
    (folder / ".npcache").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written: File exists"):
        opened(folder)


def test_links_of_a_strangers_folder_are_not_followed(folder: Path, tmp_path: Path) -> None:
    opened(folder)
    (cache,) = caches(folder)
    (tmp_path / "precious").write_text("kept")
    cache.unlink()
    cache.with_name(cache.name + ".unfinished").symlink_to(tmp_path / "precious")
    opened(folder)
    assert (tmp_path / "precious").read_text() == "kept"
    check(folder, tensors())


def test_a_link_in_place_of_the_caches_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    kept = elsewhere / f"model-{'0' * 24}.safetensors"
    kept.write_text("kept")
    (folder / ".npcache").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=r"\.npcache: is a link"):
        opened(folder)
    assert list(elsewhere.iterdir()) == [kept]


def test_other_files_beside_the_cache_stay(folder: Path) -> None:
    opened(folder)
    (folder / ".npcache" / "model-notes.safetensors").write_text("kept")
    os.utime(folder / "pytorch_model.bin", ns=(1, 1))
    opened(folder)
    assert len(caches(folder)) == 2


def test_a_bin_file_that_changes_meanwhile_makes_no_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def change(descriptor: int) -> None:
        os.utime(folder / "pytorch_model.bin", ns=(1, 1))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", change)
    with pytest.raises(CheckpointError, match=r"its \.bin files changed while their cache was written"):
        opened(folder)
    assert caches(folder) == []


def test_plain_arrays_are_written_without_torch(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "model", {})
    torch.save({"x": torch.ones(3, 4)}, root / "pytorch_model.bin")
    program = (
        "import sys\n"
        "from streaming.checkpoint import open_checkpoint\n"
        "open_checkpoint(sys.argv[1], load_format='npcache')\n"
        "heavy = {'torch', 'numpy', 'zipfile', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(f'imported: {sorted(heavy)}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(root)], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")
    check(root, {"x": torch.ones(3, 4)})


def test_a_name_that_the_cache_cannot_hold_is_refused_before_anything_is_written(folder: Path) -> None:
    torch.save({**tensors(), "__metadata__": torch.ones(2)}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: a tensor is called '__metadata__'"):
        opened(folder)
    assert caches(folder) == []

"""The key is another one whenever the stored form could be, and the same otherwise."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.write_tiny_model import TinyModel
from streaming.checkpoint.remote_file import RemoteFile
from streaming.errors import CheckpointError
from streaming.options import LoadOptions
from streaming.prepare import Prepared, prepare
from streaming.stored_cache import cache_key
from streaming.stored_cache.key import THIS_RUN, key_bytes, key_word


@pytest.fixture
def folder(tiny_folder: Callable[[TinyModel], Path], tmp_path: Path) -> Path:
    """A copy of its own, to be changed."""
    return Path(shutil.copytree(tiny_folder(TinyModel(layers=2, files=2)), tmp_path / "model"))


def word(folder: Path, **options: Any) -> str:
    return key_word(cache_key(prepare(str(folder), LoadOptions(**{"quantization": "int8_per_channel"} | options))))


def test_the_same_model_and_options_have_the_same_key(folder: Path) -> None:
    first = word(folder)
    assert word(folder) == first
    assert len(first) == 32
    others: list[dict[str, Any]] = [
        {"memory": "4GiB"}, {"threads": 1}, {"max_model_len": 16}, {"window": "8MiB"}, {"reader": "threads"},
        {"check_weights": True}, {"seed": 3}, {"kv_cache_dtype": "int8"},
    ]  # fmt: skip
    assert {word(folder, **other) for other in others} == {first}


def test_whatever_changes_what_is_stored_changes_the_key(folder: Path) -> None:
    rules = {"rules": [{"match": "mlp", "scheme": "fp8_per_channel"}]}
    others: list[dict[str, Any]] = [
        {}, {"quantization": "none"}, {"quantization": "fp8_per_channel"}, {"quantization": "int4_per_group:64"},
        {"quantization": "int4_per_group:64:asym"}, {"quantize_head": True}, {"scale_percentile": 99.0},
        {"scale_percentile": 99.5}, {"dtype": "float16"}, {"dtype": "float32"}, {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"quantization_config": json.dumps(rules)},
    ]  # fmt: skip
    words = [word(folder, **other) for other in others]
    assert len(set(words)) == len(words)


def test_every_rank_has_a_key_of_its_own(folder: Path) -> None:
    options = LoadOptions(quantization="int8_per_channel", tensor_parallel_size=2)
    keys = [key_word(cache_key(prepare(str(folder), options, rank=rank))) for rank in (0, 1)]
    assert keys[0] != keys[1]


def test_made_up_weights_depend_on_the_seed(folder: Path) -> None:
    assert word(folder, load_format="dummy", seed=1) != word(folder, load_format="dummy", seed=2)


def test_a_changed_file_has_another_key(folder: Path) -> None:
    first, file = word(folder), max(folder.glob("*.safetensors"))
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    second = word(folder)
    copy = folder / "copy"
    shutil.copy2(file, copy)
    os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    os.replace(copy, file)  # the same bytes, size and time, and another inode
    assert len({first, second, word(folder)}) == 3
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert word(folder) not in (first, second)


def test_a_file_counts_as_it_was_when_its_header_was_read(folder: Path) -> None:
    prepared = prepare(str(folder), LoadOptions())
    before = cache_key(prepared)
    file = max(folder.glob("*.safetensors"))
    os.utime(file, ns=(1, 1))
    assert cache_key(prepared) == before
    file.unlink()
    unknown = replace(prepared, checkpoint=replace(prepared.checkpoint, states={}))
    with pytest.raises(CheckpointError, match=f"{file}: No such file"):
        cache_key(unknown)


def remote(prepared: Prepared, *, etag: str | None = None, modified: str | None = None) -> Prepared:
    files = tuple(RemoteFile(f"https://host/{file.name}", 1000, etag, modified) for file in prepared.checkpoint.files)
    return replace(prepared, checkpoint=replace(prepared.checkpoint, files=files))


def test_a_file_on_a_server_counts_by_its_version(folder: Path) -> None:
    prepared = prepare(str(folder), LoadOptions())
    first, second = (cache_key(remote(prepared, etag=etag)) for etag in ('"1"', '"2"'))
    assert first["files"] != second["files"]
    assert key_word(first) != key_word(second)
    assert first == cache_key(remote(prepared, etag='"1"'))
    assert THIS_RUN not in cache_key(remote(prepared, modified="Mon, 01 Jan 2024 00:00:00 GMT"))


def test_without_a_version_the_key_is_of_this_run_only(folder: Path) -> None:
    prepared = remote(prepare(str(folder), LoadOptions()))
    first, second = cache_key(prepared), cache_key(prepared)
    assert first[THIS_RUN] != second[THIS_RUN]
    assert key_word(first) != key_word(second)


def test_a_key_is_json(folder: Path) -> None:
    key = cache_key(prepare(str(folder), LoadOptions(tensor_parallel_size=2)))
    assert key_bytes(json.loads(key_bytes(key))) == key_bytes(key)

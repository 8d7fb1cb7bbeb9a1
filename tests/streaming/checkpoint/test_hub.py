"""Hub ids against a local server that speaks the hub's API: what is asked for, what is kept, what goes wrong."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from safetensors.numpy import save

from streaming.checkpoint import hub_partial, locate, open_checkpoint
from streaming.checkpoint.hub import Transfer
from streaming.errors import CheckpointError
from tests.streaming.checkpoint.build import INDEX, array, write_gguf
from tests.streaming.checkpoint.conftest import SMALL
from tests.streaming.checkpoint.hub_server import COMMIT, OLDER, Hub
from tests.streaming.waiting import until

ROOT = Path(__file__).parents[3]
WEIGHTS = save({"x": array(64, 1024)})
BESIDE = {
    "README.md": b"# tiny", "modeling_tiny.py": b"raise", "pytorch_model.bin": b"pickle", "model.gguf": b"GGUF",
    "original/consolidated.00.pth": b"again", "original/params.json": b"{}", "consolidated.safetensors": b"again",
    "onnx/model.onnx": b"again", "onnx/model.safetensors": b"again",
}  # fmt: skip


@pytest.fixture
def hub(hub: Hub) -> Hub:
    """The server, with the model acme/tiny."""
    hub.add("acme/tiny", {**SMALL, **BESIDE, "model.safetensors": WEIGHTS})
    return hub


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_what_the_format_needs_is_fetched_and_nothing_else(hub: Hub, cache: Path) -> None:
    folder = locate("acme/tiny")
    assert folder == cache / "models--acme--tiny" / "snapshots" / COMMIT
    assert files_in(folder) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert hub.fetched() == ["config.json", "model.safetensors", "tokenizer.json"]
    assert not any("original" in path for _, path, _ in hub.requests)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert set(open_checkpoint("acme/tiny").tensors) == {"x"}


def test_mistrals_own_layout_is_fetched_by_its_format_alone(hub: Hub) -> None:
    hub.add("acme/both", {**SMALL, **BESIDE, "model.safetensors": WEIGHTS, "params.json": b"{ }"})
    own = ["config.json", "consolidated.safetensors", "params.json", "tokenizer.json"]
    for _ in range(2):  # fetched, and then found
        assert files_in(locate("acme/both", load_format="mistral")) == own
        assert hub.fetched() == own


def test_what_the_cache_has_is_not_asked_for(hub: Hub) -> None:
    folder = locate("acme/tiny")
    hub.requests.clear()
    assert locate("acme/tiny") == folder
    assert locate(f"acme/tiny@{COMMIT}") == folder
    assert locate("acme/tiny", load_format="safetensors") == folder
    assert hub.requests == []


def test_a_format_that_the_cache_has_not_is_fetched_besides(hub: Hub) -> None:
    folder = locate("acme/tiny")
    hub.requests.clear()
    assert locate("acme/tiny", load_format="npcache") == folder
    assert hub.fetched() == ["pytorch_model.bin"]


@pytest.mark.parametrize("asked", ["acme/tiny@v1", f"acme/tiny@{OLDER}", "acme/tiny"])
def test_a_revision_is_a_tag_a_commit_or_an_option(hub: Hub, asked: str) -> None:
    older = save({"older": array(2)})
    hub.add("acme/tiny", {**SMALL, "model.safetensors": WEIGHTS}, older={**SMALL, "model.safetensors": older})
    folder = locate(asked, revision=None if "@" in asked else "v1")
    assert folder.name == OLDER
    assert (folder / "model.safetensors").read_bytes() == older
    hub.requests.clear()
    assert locate("acme/tiny", revision="v1" if "v1" in asked else OLDER) == folder
    assert hub.requests == []


def test_offline_the_cache_alone_is_asked(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = locate("acme/tiny")
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert locate("acme/tiny") == folder
    for absent in ("acme/other", "acme/tiny@v1"):
        with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE forbids"):
            locate(absent)
    assert hub.requests == []


def test_an_index_says_which_weights_are_fetched(hub: Hub) -> None:
    parts = {f"model-0000{part}-of-00002.safetensors": save({f"x{part}": array(2)}) for part in (1, 2)}
    index = {"weight_map": {f"x{part}": name for part, name in enumerate(parts, 1)}}
    hub.add("acme/split", {**SMALL, **parts, INDEX: json.dumps(index).encode(), "model.safetensors": WEIGHTS})
    folder = locate("acme/split")
    assert files_in(folder) == sorted([*SMALL, INDEX, *parts])
    (folder / "model-00002-of-00002.safetensors").unlink()
    hub.requests.clear()
    assert locate("acme/split") == folder
    assert hub.fetched() in ([], ["model-00002-of-00002.safetensors"])  # its bytes are still among the cache's blobs
    assert set(open_checkpoint("acme/split").tensors) == {"x1", "x2"}


def test_parts_without_an_index_are_whole_when_all_are_there(hub: Hub) -> None:
    parts = {f"model-0000{part}-of-00002.safetensors": save({f"x{part}": array(2)}) for part in (1, 2)}
    hub.add("acme/split", {**SMALL, **parts})
    folder = locate("acme/split")
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert locate("acme/split") == folder
    assert (folder / "model-00001-of-00002.safetensors").exists()


def test_a_connection_that_is_cut_is_taken_up_where_it_ended(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 4096)  # the client keeps whole chunks
    hub.cuts["model.safetensors"] = 100_000
    folder = locate("acme/tiny")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    first, second = hub.ranges("model.safetensors")
    assert first is None
    assert second is not None
    assert second.startswith("bytes=")
    assert 0 < int(second.removeprefix("bytes=").removesuffix("-")) <= 100_000


def test_after_a_failure_whole_files_are_not_fetched_again(hub: Hub) -> None:
    whole = {"model-00001-of-00002.safetensors": save({"x1": array(2)})}
    broken = Hub()
    broken.add("acme/split", {**SMALL, **whole, "model-00002-of-00002.safetensors": WEIGHTS})
    hub.repos["acme/split"] = broken.repos["acme/split"]
    hub.repos["acme/split"].gated = True
    with pytest.raises(CheckpointError):
        locate("acme/split")
    hub.repos["acme/split"].gated = False
    folder = locate("acme/split")
    (folder / "model-00002-of-00002.safetensors").resolve().unlink()
    hub.requests.clear()
    assert locate("acme/split") == folder
    assert hub.fetched() == ["model-00002-of-00002.safetensors"]
    assert (folder / "model-00002-of-00002.safetensors").read_bytes() == WEIGHTS


def test_progress_counts_files_and_bytes_of_what_is_missing(hub: Hub) -> None:
    told: list[Transfer] = []
    locate("acme/tiny", tell=told.append)
    total = len(WEIGHTS) + sum(map(len, SMALL.values()))
    assert told[-1].nbytes == total
    assert max(state.nbytes_done for state in told) == total
    assert max(state.files_done for state in told) == told[-1].files == 3
    assert all(state.nbytes_done <= state.nbytes for state in told)


def test_a_gated_model_says_where_access_is_given(hub: Hub) -> None:
    hub.repos["acme/tiny"].gated = True
    with pytest.raises(CheckpointError, match="it is gated: ask for access at") as caught:
        locate("acme/tiny")
    assert f"{hub.url}/acme/tiny" in str(caught.value)
    assert "HF_TOKEN" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("acme/none", "has no such repository, or it is private"),
        ("acme/tiny@v9", r"revision 'v9' could not be fetched: it has no such branch, tag or commit"),
        ("acme/bare", r"no weights at its top; looked for .*\*\.safetensors.*; found README\.md, config\.json"),
        ("acme/deep", r"no weights at its top; looked for .*; found original/model\.safetensors"),
        ("acme/quants", r"2 GGUF models: a\.gguf, b\.gguf; name the one that is meant, as in owner/name/a\.gguf"),
        ("acme/quants/c.gguf", r"no file c\.gguf; its GGUF files are: a\.gguf, b\.gguf"),
    ],
)
def test_what_cannot_be_fetched_is_said_in_words_before_any_file_is(
    hub: Hub, cache: Path, asked: str, words: str
) -> None:
    hub.add("acme/bare", {"config.json": b"{}", "README.md": b""})
    hub.add("acme/deep", {"config.json": b"{}", "original/model.safetensors": WEIGHTS})
    hub.add("acme/quants", {"a.gguf": b"GGUF", "b.gguf": b"GGUF"})
    with pytest.raises(CheckpointError, match=words) as caught:
        locate(asked)
    assert "\n" not in str(caught.value)
    assert str(cache) in str(caught.value)
    assert hub.fetched() == []


def test_a_hub_that_cannot_be_reached_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        locate("acme/tiny")


def test_one_gguf_file_of_many_is_named_behind_the_model(hub: Hub, tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "made.gguf").read_bytes()
    hub.add("acme/quants", {"q4.gguf": data, "q8.gguf": b"GGUF", "sub/q2.gguf": data})
    path = locate("acme/quants/q4.gguf")
    assert path.read_bytes() == data
    assert hub.fetched() == ["q4.gguf"]
    hub.requests.clear()
    assert locate("acme/quants/q4.gguf") == path
    assert open_checkpoint("acme/quants/q4.gguf").format == "gguf"
    assert hub.requests == []
    assert locate("acme/quants/sub/q2.gguf@main").name == "q2.gguf"


def test_all_parts_of_a_split_gguf_are_fetched(hub: Hub) -> None:
    parts: Mapping[str, Any] = {f"m-0000{part}-of-00002.gguf": b"GGUF" + bytes([part]) for part in (1, 2)}
    hub.add("acme/quants", {**parts, "other.gguf": b"GGUF"})
    path = locate("acme/quants/m-00002-of-00002.gguf")
    assert files_in(path.parent) == sorted(parts)


LARGE = save({"x": array(6, 1024, 1024)})  # 24 MiB: more than twice what the client takes at once
BLOB = hashlib.sha256(LARGE).hexdigest()


@pytest.fixture
def left(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a run leaves of acme/large that is killed in the middle of its only large file."""
    monkeypatch.setattr(hub_partial, "LARGE_NBYTES", 16 << 20)
    hub.add("acme/large", {**SMALL, "model.safetensors": LARGE})
    hub.stalls["model.safetensors"] = 20 << 20
    code = "import sys; from streaming.checkpoint import hub_partial, locate; hub_partial.LARGE_NBYTES = 16 << 20; "
    process = subprocess.Popen([sys.executable, "-c", f"{code} locate('acme/large')"], cwd=ROOT, env=dict(os.environ))
    left = cache / "models--acme--large" / "blobs" / f"{BLOB}.partial"
    try:
        until(lambda: left.exists() and left.stat().st_size >= 10_000_000)
    finally:
        process.kill()
        process.wait()
    hub.requests.clear()
    return left


def test_a_large_file_is_taken_up_where_a_killed_run_ended(hub: Hub, left: Path) -> None:
    had_nbytes = left.stat().st_size
    assert left.read_bytes() == LARGE[:had_nbytes]
    told: list[Transfer] = []
    folder = locate("acme/large", tell=told.append)
    assert hub.ranges("model.safetensors") == [f"bytes={had_nbytes}-"]
    assert (folder / "model.safetensors").read_bytes() == LARGE
    assert (folder / "model.safetensors").resolve() == left.with_name(BLOB)
    assert not left.exists()
    assert told[-1].nbytes_done == told[-1].nbytes == len(LARGE) - had_nbytes  # the small files were there
    hub.requests.clear()
    assert locate("acme/large") == folder
    assert hub.requests == []


def test_what_is_taken_up_is_held_against_its_checksum(hub: Hub, left: Path) -> None:
    with left.open("r+b") as file:
        file.seek(5_000_000)
        file.write(b"lost")
    with pytest.raises(CheckpointError, match="what an earlier run left of it was wrong; it is removed, run it again"):
        locate("acme/large")
    assert not left.exists()
    assert (locate("acme/large") / "model.safetensors").read_bytes() == LARGE


def test_a_partial_file_that_another_process_fills_is_left_alone(hub: Hub, left: Path) -> None:
    before = left.read_bytes()
    with left.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        folder = locate("acme/large")
    assert hub.ranges("model.safetensors") == [None]  # by the client, in a file of its own
    assert (folder / "model.safetensors").read_bytes() == LARGE
    assert left.read_bytes() == before


def test_a_large_file_that_is_cut_is_taken_up_in_the_same_run(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_partial, "LARGE_NBYTES", 1)
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    hub.cuts["model.safetensors"] = 100_000
    told: list[Transfer] = []
    folder = locate("acme/tiny", tell=told.append)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    first, second = hub.ranges("model.safetensors")
    assert first is None
    assert second is not None
    assert told[-1].nbytes_done == told[-1].nbytes == len(WEIGHTS) + sum(map(len, SMALL.values()))
    assert told[-1].files_done == 3

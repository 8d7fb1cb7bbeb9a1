"""FIRSTLAYER_USE_MODELSCOPE: ModelScope's own package is asked in the hub's place; here a stand-in that records it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from streaming import cli
from streaming.checkpoint import locate, open_checkpoint
from streaming.errors import CheckpointError, OptionError
from tests.streaming.checkpoint.build import array, write_folder
from tests.streaming.checkpoint.hub_server import Hub


class Package(ModuleType):
    """`modelscope` with one function; what it brings lies in a folder already."""

    def __init__(self, folder: Path) -> None:
        super().__init__("modelscope")
        self.folder = folder
        self.error: Exception | None = None
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(self, model_id: str, **options: Any) -> str:
        self.calls.append((model_id, options))
        if self.error is not None:
            raise self.error
        return str(self.folder)


@pytest.fixture
def package(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """The variable set and the package there; the hub's server has nothing."""
    package = Package(write_folder(tmp_path / "fetched", {"model.safetensors": {"x": array(2)}}))
    monkeypatch.setenv("FIRSTLAYER_USE_MODELSCOPE", "1")
    monkeypatch.setitem(sys.modules, "modelscope", package)
    return package


def test_its_package_is_asked_and_the_hub_is_not(package: Package, hub: Hub) -> None:
    assert locate("acme/tiny") == package.folder
    ((model, options),) = package.calls
    assert model == "acme/tiny"
    assert options["revision"] is None
    assert options["local_files_only"] is False
    assert {"*.safetensors", "*.json", "tokenizer*"} <= set(options["allow_patterns"])
    assert not any("bin" in pattern for pattern in options["allow_patterns"])
    assert options["ignore_patterns"] == ["*/*"]
    assert set(open_checkpoint("acme/tiny").tensors) == {"x"}
    assert hub.requests == []


def test_a_revision_and_being_offline_are_passed_on(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert locate("acme/tiny@v2") == package.folder
    assert package.calls[0][1]["revision"] == "v2"
    assert package.calls[0][1]["local_files_only"] is True


def test_patterns_are_asked_for_until_one_brings_weights(package: Package) -> None:
    (package.folder / "model.safetensors").rename(package.folder / "pytorch_model.bin")
    assert locate("acme/tiny") == package.folder
    assert [options["allow_patterns"][-1] for _, options in package.calls] == ["*.safetensors", "*.bin"]
    (package.folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"no weights on ModelScope .*looked for \*\.safetensors, \*\.bin"):
        locate("acme/tiny")


def test_one_gguf_file_is_asked_for_by_its_name(package: Package) -> None:
    (package.folder / "q4.gguf").write_bytes(b"GGUF")
    assert locate("acme/tiny/q4.gguf") == package.folder / "q4.gguf"
    assert "q4.gguf" in package.calls[0][1]["allow_patterns"]


def test_what_fails_there_is_one_line_and_nothing_else_is_asked(package: Package, hub: Hub) -> None:
    package.error = ValueError("\nno such model\nand more")
    with pytest.raises(CheckpointError, match=r"could not be fetched from ModelScope .*: no such model$"):
        locate("acme/tiny")
    assert hub.requests == []


def test_without_the_package_the_command_that_brings_it_is_named(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(OptionError, match=r"FIRSTLAYER_USE_MODELSCOPE needs .*: pip install modelscope"):
        locate("acme/tiny")


def test_download_goes_there_too(package: Package, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["download", "acme/tiny"]) == 0
    assert capsys.readouterr().out == f"{package.folder}\n"


@pytest.mark.parametrize("value", ["", "0", "no"])
def test_a_variable_that_says_no_is_no(package: Package, hub: Hub, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRSTLAYER_USE_MODELSCOPE", value)
    with pytest.raises(CheckpointError, match="has no such repository"):
        locate("acme/tiny")
    assert package.calls == []

"""Models over HTTP are the local models to the bit, and addresses that cannot work are told."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from examples.write_tiny_model import TinyModel
from streaming import LLM, OptionError
from streaming.checkpoint import open_checkpoint
from streaming.cli import run as run_command
from streaming.errors import CheckpointError
from streaming.remote.reading import Piece, runs
from tests.streaming.remote.range_server import RangeServer, serving
from tests.streaming.remote.remote_model import IDS, logits


@pytest.mark.parametrize("load_format", ["auto", "remote"])
def test_a_remote_folder_gives_the_local_logits_to_the_bit(
    server: RangeServer, expected: torch.Tensor, load_format: str
) -> None:
    assert torch.equal(logits(server.url, load_format=load_format), expected)


def test_a_quantized_remote_model_passes_through_the_window_to_the_same_bits(server: RangeServer, folder: Path) -> None:
    local = logits(str(folder), quantization="int8_per_channel", window="64KiB")
    assert torch.equal(logits(server.url, quantization="int8_per_channel", window="64KiB"), local)


def test_a_single_remote_file_is_a_model(tiny_folder: Callable[[TinyModel], Path], expected: torch.Tensor) -> None:
    with serving(tiny_folder(TinyModel(layers=4, files=1))) as server:
        assert torch.equal(logits(f"{server.url}model.safetensors"), expected)
        assert torch.equal(logits(server.url.rstrip("/")), expected)  # without an index it is the one that is tried


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that nobody trusts, and its key, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("the program openssl, which makes certificates, is not here")
    path = tmp_path_factory.mktemp("certificate") / "both.pem"
    options = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=local -addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", str(path), "-out", str(path.with_suffix(".crt"))]
    subprocess.run(["openssl", *options.split(), *files], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + path.with_suffix(".crt").read_bytes())
    return path


def test_https_gives_the_local_logits_with_a_certificate_that_is_trusted(
    folder: Path, expected: torch.Tensor, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_suffix(".crt")))
    with serving(folder, certificate=certificate) as server:
        assert torch.equal(logits(server.url), expected)


def test_a_certificate_that_is_not_trusted_is_told(folder: Path, certificate: Path) -> None:
    with (
        serving(folder, certificate=certificate) as server,
        pytest.raises(CheckpointError, match="the server's certificate is not trusted"),
    ):
        open_checkpoint(server.url)


def test_no_weight_is_written_beside_the_small_files(server: RangeServer, private_cache: Path) -> None:
    logits(server.url)
    written = {path.name for path in private_cache.rglob("*") if path.is_file()}
    assert written == {"config.json", "model.safetensors.index.json", ".etags.json"}


def test_the_bytes_read_are_the_plans(server: RangeServer) -> None:
    with LLM(server.url) as llm:
        llm.logits(IDS)
        llm.wait_loaded()
        rows = len(set(IDS)) * 64 * 2
        assert llm.stats().bytes_read == llm.prepared.plan.read_nbytes
        assert llm.stats().bytes_rows == rows


def test_small_files_are_asked_for_again_only_when_they_changed(server: RangeServer, folder: Path) -> None:
    config = folder / "config.json"
    assert open_checkpoint(server.url).config["max_position_embeddings"] == 512
    assert open_checkpoint(server.url).config["max_position_embeddings"] == 512
    second = [headers for path, headers in server.requests if path == "/config.json"][1]
    assert second["If-None-Match"] == server.marks(config.read_bytes())["ETag"]
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 256}))
    assert open_checkpoint(server.url).config["max_position_embeddings"] == 256


def test_a_small_file_that_is_gone_from_the_server_is_gone_here(server: RangeServer, folder: Path) -> None:
    (folder / "generation_config.json").write_text("{}")
    root = open_checkpoint(server.url).root
    assert (root / "generation_config.json").exists()
    (folder / "generation_config.json").unlink()
    open_checkpoint(server.url)
    assert not (root / "generation_config.json").exists()


def test_the_plan_names_the_address(server: RangeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", server.url]) == 0
    assert capsys.readouterr().out.startswith(f"{server.url}: llama")


def test_neighbouring_pieces_are_one_request_and_distant_ones_are_not() -> None:
    near = [Piece(0, 0, 1000, 24, 0, 0, 0), Piece(1, 0, 0, 1000, 0, 64, 0), Piece(2, 0, 66_000, 8, 0, 2000, 0)]
    far = [Piece(3, 0, 200_000, 8, 0, 3000, 0), Piece(4, 1, 200_008, 8, 0, 4000, 0), Piece(5, 0, 66_000, 8, 1, 0, 0)]
    assert [[piece.index for piece in run] for run in runs(near + far)] == [[1, 0, 2], [5], [3], [4]]


def test_one_file_of_several_and_a_missing_tokenizer_name_the_address(server: RangeServer) -> None:
    with pytest.raises(CheckpointError, match=rf"is file 1 of 2; give the folder, {server.url}$"):
        open_checkpoint(f"{server.url}model-00001-of-00002.safetensors")
    with LLM(server.url) as llm, pytest.raises(CheckpointError, match=rf"^{server.url}: has no tokenizer\.json"):
        list(llm.generate("text"))


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("file:///models/x", {}, "without file://"),
        ("ftp://host/x", {}, "ftp:// is not supported; known are http://"),
        ("http:///x", {}, "names no host"),
        ("http://host:99999/x", {}, "is not a valid address"),
        ("https://user:word@host/x", {}, r"https://...@host: credentials do not belong into an address"),
        ("http://host/x?a=b", {}, "query"),
        ("http://host/a b", {}, "no spaces"),
        ("http://host/x", {"load_format": "gguf"}, "--load-format gguf reads local files"),
        ("http://host/x", {"revision": "main"}, "belongs to hub ids"),
        ("https://huggingface.co/acme/tiny", {}, "is a model's page; give its name on the hub, acme/tiny$"),
        (".", {"load_format": "remote"}, "--load-format remote needs an address"),
        (".", {"remote_cache": "/tmp/x"}, "--remote-cache /tmp/x belongs to addresses"),
    ],
)
def test_addresses_and_options_that_cannot_work_are_told(model: str, options: dict[str, str], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        open_checkpoint(model, **options)


@pytest.mark.parametrize("options", [{"reader": "threads"}, {"safetensors_load_strategy": "direct"}])
def test_ways_to_read_local_files_are_refused(server: RangeServer, options: dict[str, str]) -> None:
    with pytest.raises(OptionError, match="local files"):
        LLM(server.url, **options)  # type: ignore[arg-type]


def test_a_credential_that_is_no_header_is_refused(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRSTLAYER_HTTP_AUTHORIZATION", "Bearer a\r\nX: y")
    with pytest.raises(OptionError, match="FIRSTLAYER_HTTP_AUTHORIZATION"):
        open_checkpoint(server.url)


def test_a_cache_that_cannot_be_written_is_told(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FIRSTLAYER_CACHE", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"cannot be written .Not a directory.*FIRSTLAYER_CACHE names another"):
        open_checkpoint(server.url)


def test_commands_that_need_local_files_say_so(server: RangeServer, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("verify", "bench"):
        assert run_command([command, server.url]) == 2
        assert "local files" in capsys.readouterr().err

"""Models in a bucket of a local S3 server: the local model's logits, and errors in words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import torch

from examples.write_tiny_model import TinyModel
from streaming import LLM, OptionError
from streaming.checkpoint import open_checkpoint
from streaming.errors import CheckpointError
from streaming.file_ranges import open_ranges

IDS = [5, 9, 2, 7]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A local S3 server."""
    pytest.importorskip("obstore", reason="the package obstore is not installed")
    pytest.importorskip("moto.server", reason="the package moto[server] is not installed")
    program = (
        "from moto.server import ThreadedMotoServer as S; import sys; s = S(ip_address='127.0.0.1', port=0, "
        "verbose=False); s.start(); print(s.get_host_and_port()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.kill()


@pytest.fixture
def bucket(endpoint: str, four_layers: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], str]:
    """Puts the files of a folder into a bucket and gives the address."""
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint, "FIRSTLAYER_CACHE": str(tmp_path / "cache"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)

    def put(folder: Path) -> str:
        with urlopen(Request(f"{endpoint}/models", data=b"", method="PUT")) as answer:
            assert answer.status == 200
        for path in folder.iterdir():
            put_object(f"{folder.name}/{path.name}", path.read_bytes())
        return f"s3://models/{folder.name}/"

    return put


def put_object(key: str, data: bytes) -> None:
    import obstore
    from obstore.store import from_url

    obstore.put(from_url("s3://models", client_options={"allow_http": True}), key, data)


def test_a_model_in_a_bucket_gives_the_local_logits_to_the_bit(
    bucket: Callable[[Path], str], four_layers: Path
) -> None:
    with LLM(four_layers) as llm:
        expected = llm.logits(IDS)
    with LLM(bucket(four_layers)) as llm:
        assert torch.equal(llm.logits(IDS), expected)


def test_an_object_that_changes_under_way_is_told(
    bucket: Callable[[Path], str], tiny_folder: Callable[[TinyModel], Path]
) -> None:
    folder = tiny_folder(TinyModel(layers=4))
    address = bucket(folder)
    (file, _) = open_checkpoint(address).files
    data = (folder / file.name).read_bytes()
    put_object(f"{folder.name}/{file.name}", data[:-1] + b"x")
    with (
        closing(open_ranges(file)) as ranges,
        pytest.raises(CheckpointError, match=rf"{address}{file.name}: changed on the server during the load"),
    ):
        ranges.read([(0, 8)])


def test_what_is_not_in_the_bucket_is_told(bucket: Callable[[Path], str], four_layers: Path) -> None:
    address = bucket(four_layers)
    with pytest.raises(CheckpointError, match=r"s3://models/nothing/config\.json: is missing"):
        open_checkpoint("s3://models/nothing/")
    assert open_checkpoint(address).name == address


def test_without_the_package_the_line_that_brings_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FIRSTLAYER_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(OptionError, match="pip install obstore"):
        open_checkpoint("s3://bucket/model/")

"""Whatever a server does: the local model's logits all the same, or an error that says what it did."""

from __future__ import annotations

import gzip
import random
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch

from streaming import LLM, LayerLoadError
from streaming.checkpoint import open_checkpoint
from streaming.checkpoint.remote_file import RemoteFile
from streaming.errors import CheckpointError, CheckpointFormatError
from streaming.remote.folder import open_remote
from streaming.remote.ranges import RangeFetcher
from tests.streaming.remote.range_server import Handler, RangeServer, serving, times
from tests.streaming.remote.remote_model import FIRST, HASTY, IDS, SECOND, logits, on_weights

# --- faults that are got over ---------------------------------------------------------------------------------------


def test_connections_cut_at_twenty_random_bytes_change_no_bit(server: RangeServer, expected: torch.Tensor) -> None:
    draw = random.Random(3)

    def cut(handler: Handler) -> None:
        first, last = handler.bounds
        handler.answer(cut_after=draw.randrange(min(last - first + 1, 9000)))

    server.faults = [times(20, on_weights(cut))]
    assert torch.equal(logits(server.url), expected)
    before = len(server.requests)
    server.faults = []
    assert torch.equal(logits(server.url), expected)
    assert before >= len(server.requests) - before + 20  # each cut was answered with one more request


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(server: RangeServer, expected: torch.Tensor, status: int) -> None:
    def busy(handler: Handler) -> bool:
        handler.reply(status, headers={"Retry-After": "0"})
        return True

    server.faults = [times(2, busy)]
    assert torch.equal(logits(server.url), expected)


@pytest.mark.usefixtures("hasty")
def test_a_server_that_falls_silent_is_asked_again(server: RangeServer, expected: torch.Tensor) -> None:
    over = threading.Event()
    server.faults = [times(1, on_weights(lambda handler: over.wait(20)))]
    try:
        assert torch.equal(logits(server.url), expected)
    finally:
        over.set()


def test_redirects_are_followed_and_credentials_stay_with_their_host(
    server: RangeServer, expected: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRSTLAYER_HTTP_AUTHORIZATION", "Bearer secret")
    (tmp_path / "nothing").mkdir()
    with serving(tmp_path / "nothing") as front:

        def forward(handler: Handler) -> bool:
            handler.reply(302, headers={"Location": f"{server.url}{handler.path[1:]}"})
            return True

        front.faults = [forward]
        assert torch.equal(logits(front.url), expected)
    assert {headers.get("Authorization") for _, headers in front.requests} == {"Bearer secret"}
    assert {headers.get("Authorization") for _, headers in server.requests} == {None}


def test_the_way_of_a_redirect_is_remembered_until_it_leads_nowhere(server: RangeServer, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with serving(tmp_path / "nothing") as front, closing(RangeFetcher(policy=HASTY)) as fetcher:
        front.faults = [lambda handler: handler.reply(302, headers={"Location": server.url + FIRST})]
        head, _ = fetcher.fetch_first(f"{front.url}{FIRST}", 8)
        file = RemoteFile(f"{front.url}{FIRST}", head.nbytes, head.etag, head.modified)
        fetcher.fetch(file, 8, 16, lambda data: None)
        assert (len(front.requests), len(server.requests)) == (1, 2)
        server.faults = [times(1, lambda handler: handler.reply(403))]  # a signature has expired
        fetcher.fetch(file, 16, 24, lambda data: None)
        assert (len(front.requests), len(server.requests)) == (2, 4)


# --- faults that are told -------------------------------------------------------------------------------------------


def test_what_changes_under_way_is_an_error_naming_the_file(server: RangeServer, folder: Path) -> None:
    def change(handler: Handler) -> bool:
        if handler.wants_weights:
            path = folder / handler.path.lstrip("/")
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        return False

    for server.checks in (True, False):
        server.faults = [times(1, lambda handler: False), change]
        with pytest.raises((LayerLoadError, CheckpointError)) as caught:
            logits(server.url)
        assert f"{server.url}model-0000" in str(caught.value)
        assert "changed on the server during the load" in str(caught.value)


def test_a_file_without_etag_that_changes_its_size_or_date_is_told(server: RangeServer, folder: Path) -> None:
    server.tells_etag = False
    server.faults = [
        on_weights(lambda handler: handler.answer(extra={"Last-Modified": "Wed, 04 Mar 2026 10:00:00 GMT"}))
    ]
    with pytest.raises(LayerLoadError, match=r"changed on the server during the load .it was last modified Tue"):
        logits(server.url)


def test_a_server_without_etag_and_date_is_warned_of(server: RangeServer, expected: torch.Tensor) -> None:
    server.tells_etag = server.tells_date = False
    with LLM(server.url) as llm:
        assert torch.equal(llm.logits(IDS), expected)
        assert any("neither its ETag nor its date" in text for text in llm.stats().warnings)


def test_a_server_that_ignores_ranges_is_refused(server: RangeServer, folder: Path) -> None:
    def ignore(handler: Handler) -> bool:
        if handler.path.endswith(".safetensors"):
            data = (folder / handler.path[1:]).read_bytes()
            handler.reply(200, data, headers=server.marks(data))
            return True
        return False

    server.faults = [ignore]
    with pytest.raises(CheckpointError, match=f"{server.url}{FIRST}: the server ignores byte ranges"):
        open_checkpoint(server.url)


def test_a_missing_file_of_several_is_named(server: RangeServer, folder: Path) -> None:
    (folder / SECOND).unlink()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(server.url)
    assert str(caught.value) == (
        f"{server.url}{SECOND}: is not there (the server answers 404 Not Found) (model.safetensors.index.json names it)"
    )


@pytest.mark.parametrize("status", [401, 403])
def test_what_may_not_be_read_says_so(server: RangeServer, status: int) -> None:
    server.faults = [lambda handler: handler.reply(status)]
    with pytest.raises(
        CheckpointError, match=rf"config.json: may not be read .*{status}.*FIRSTLAYER_HTTP_AUTHORIZATION"
    ):
        open_checkpoint(server.url)


def test_compressed_weights_are_refused(server: RangeServer, folder: Path) -> None:
    def compress(handler: Handler) -> bool:
        if handler.path.endswith(".safetensors"):
            data = gzip.compress((folder / handler.path[1:]).read_bytes()[:100])
            headers = {"Content-Encoding": "gzip", "Content-Range": "bytes 0-99/1000"}
            handler.reply(206, data, headers=headers)
            return True
        return False

    server.faults = [compress]
    with pytest.raises(CheckpointError, match=r"compressed .Content-Encoding: gzip"):
        open_checkpoint(server.url)


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"Content-Range": "bytes 0-99/1000"}, "the server sends 'bytes 0-99/1000'"),
        ({"Content-Range": "bytes lots"}, "the server sends 'bytes lots'"),
        ({"Content-Length": "7"}, "Content-Length"),
    ],
)
def test_answers_that_lie_about_themselves_are_refused(
    server: RangeServer, headers: dict[str, str], words: str
) -> None:
    server.faults = [on_weights(lambda handler: handler.answer(extra=headers))]
    with pytest.raises(LayerLoadError, match=words):
        logits(server.url)


def test_an_endless_redirect_ends(server: RangeServer) -> None:
    server.faults = [lambda handler: handler.reply(302, headers={"Location": f"{handler.path}x"})]
    with pytest.raises(CheckpointError, match="redirects more than 5 times"):
        open_checkpoint(server.url)


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://host/x", "http://ho st/"])
def test_redirects_to_elsewhere_than_http_are_not_followed(server: RangeServer, target: str) -> None:
    server.faults = [lambda handler: handler.reply(302, headers={"Location": target})]
    with pytest.raises(CheckpointError, match="which is not followed"):
        open_checkpoint(server.url)


def test_a_server_that_is_not_there_is_given_up_after_some_attempts(folder: Path) -> None:
    with serving(folder) as server:
        url = server.url
    with pytest.raises(CheckpointError, match=rf"{url}.*Connection refused; given up after 3 attempts"):
        open_remote(url, policy=HASTY)


@pytest.mark.usefixtures("hasty")
def test_a_server_that_dies_during_the_load_is_given_up(server: RangeServer) -> None:
    server.faults = [on_weights(lambda handler: handler.reply(503))]
    with pytest.raises(LayerLoadError, match=r"503 Service Unavailable; given up after \d+ attempts"):
        logits(server.url)


def test_broken_headers_are_told_as_for_local_files(server: RangeServer, folder: Path) -> None:
    data = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(data[:-10])
    with pytest.raises(CheckpointFormatError, match=f"{server.url}{FIRST}: is cut short by 10 bytes"):
        open_checkpoint(server.url)
    (folder / FIRST).write_bytes((1 << 60).to_bytes(8, "little") + data[8:])
    with pytest.raises(CheckpointFormatError, match="is not a safetensors file"):
        open_checkpoint(server.url)
    (folder / FIRST).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointFormatError, match="is a git-lfs pointer of 43 bytes"):
        open_checkpoint(server.url)
    (folder / FIRST).write_bytes(b"")
    with pytest.raises(CheckpointError, match="is empty"):
        open_checkpoint(server.url)


def test_an_index_that_leads_out_of_the_folder_is_refused(server: RangeServer, folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(FIRST, f"../{FIRST}"))
    with pytest.raises(CheckpointFormatError, match=f"{server.url}model.safetensors.index.json: .*leads outside"):
        open_checkpoint(server.url)


def test_a_header_longer_than_the_first_range_is_read_to_its_end(folder: Path, expected: torch.Tensor) -> None:
    path = folder / FIRST
    data = path.read_bytes()
    nbytes = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + nbytes] + b" " * 300_000
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + nbytes :])
    with serving(folder) as server:
        assert torch.equal(logits(server.url), expected)


# --- an interrupt ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "begin"), [("plan", 0), ("generate", 1)], ids=["headers", "weights"])
def test_an_interrupt_ends_at_once_while_the_server_is_silent(server: RangeServer, command: str, begin: int) -> None:
    over, asked = threading.Event(), threading.Event()

    def silent(handler: Handler) -> bool:
        if not handler.path.endswith(".safetensors") or handler.bounds[0] < begin:
            return False
        asked.set()
        return over.wait(30)

    server.faults = [silent]
    words = [sys.executable, "-m", "streaming", command, server.url]
    words += ["--ids", "1,2", "--quiet"] if command == "generate" else []
    root = Path(__file__).parents[3]
    with subprocess.Popen(words, cwd=root, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert asked.wait(20)
        process.send_signal(2)
        assert process.communicate(timeout=5)[1] == f"firstlayer {command}: error: interrupted\n"
    over.set()

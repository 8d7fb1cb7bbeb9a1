"""The throttled server gives a model's ranges, tells a changed file, and nothing of what lies outside its folder."""

from __future__ import annotations

import http.client
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.serve_throttled import Server, Throttle


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of a folder with one file of ten bytes; another lies beside the folder."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"0123456789")
    (tmp_path / "secret").write_bytes(b"not for you")
    found = Server(tmp_path / "folder", port=0, bytes_per_s=1e9)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join()


def get(server: Server, path: str, **headers: str) -> tuple[int, str | None, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    found = answer.status, answer.getheader("ETag"), answer.read()
    connection.close()
    return found


def test_whole_files_and_ranges_are_given(server: Server) -> None:
    status, etag, data = get(server, "/file")
    assert (status, data) == (200, b"0123456789")
    assert get(server, "/file", Range="bytes=2-4") == (206, etag, b"234")
    assert get(server, "/file", Range="bytes=8-99") == (206, etag, b"89")
    assert get(server, "/file", Range="bytes=10-11")[0] == 416


def test_another_version_is_told(server: Server) -> None:
    _, etag, _ = get(server, "/file")
    assert etag is not None
    assert get(server, "/file", If_None_Match=etag)[0] == 304
    os.utime(server.folder / "file", ns=(1, 1))
    assert get(server, "/file", If_Match=etag)[0] == 412


@pytest.mark.parametrize("path", ["/../secret", "/%2e%2e/secret", "//etc/passwd", "/", "/nothing"])
def test_what_is_not_in_the_folder_is_not_given(server: Server, path: str) -> None:
    assert get(server, path)[0] == 404


def test_all_connections_share_one_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("examples.serve_throttled.time.sleep", slept.append)
    monkeypatch.setattr("examples.serve_throttled.time.monotonic", lambda: 100.0)
    throttle = Throttle(bytes_per_s=10.0)
    for _ in range(3):
        throttle.wait(5)
    assert slept == pytest.approx([0.5, 1.0, 1.5])

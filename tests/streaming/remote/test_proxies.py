"""Remote models by way of a proxy: every byte passes through it, and what it refuses is told."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from streaming.checkpoint import open_checkpoint
from streaming.errors import CheckpointError, OptionError
from streaming.remote.proxy import Proxy, proxy_for
from streaming.remote.small_files import SMALL_FILES
from tests.streaming.remote.range_server import RangeServer, serving
from tests.streaming.remote.remote_model import logits


@dataclass
class LocalProxy:
    """What it was asked for, and the credentials that it wants ("" for none)."""

    wanted: str = ""
    lines: list[str] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    url: str = ""
    refuses: bytes = b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n"


def _head(connection: socket.socket) -> bytes:
    head = b""
    while b"\r\n\r\n" not in head and (data := connection.recv(65536)):
        head += data
    return head


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _serve_one(proxy: LocalProxy, client: socket.socket) -> None:
    """One connection: a CONNECT, or requests for one http server, whose lines are put in the form that it knows."""
    with client:
        head = _head(client)
        while head:
            line = head.split(b"\r\n", 1)[0].decode()
            proxy.lines.append(line)
            proxy.heads.append(head)
            if proxy.wanted and f"Proxy-Authorization: {proxy.wanted}".encode() not in head:
                client.sendall(proxy.refuses)
                return
            method, target, version = line.split()
            host, port = re.fullmatch(r"(?:http://)?([^/:]+):(\d+)(?:/.*)?", target).groups()  # type: ignore[union-attr]
            with socket.create_connection((host, int(port))) as server:
                if method == "CONNECT":
                    client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    back = threading.Thread(target=_pump, args=(server, client), daemon=True)
                    back.start()
                    _pump(client, server)
                    return
                path = "/" + target.split("/", 3)[3]
                rest = head.split(b"\r\n", 1)[1]
                server.sendall(f"{method} {path} {version}\r\nConnection: close\r\n".encode() + rest)
                while data := server.recv(65536):
                    client.sendall(data)
            return


@pytest.fixture
def proxy() -> Iterator[LocalProxy]:
    """A tiny proxy on a local port."""
    found = LocalProxy()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        found.url = f"http://127.0.0.1:{listening.getsockname()[1]}"

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listening.accept()
                    threading.Thread(target=_serve_one, args=(found, client), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield found
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)


def test_an_http_model_comes_by_way_of_the_proxy(
    server: RangeServer, proxy: LocalProxy, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    assert torch.equal(logits(server.url), expected)
    assert len(proxy.lines) == len(server.requests)
    assert all(line.startswith(f"GET {server.url}") for line in proxy.lines)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("the program openssl, which makes certificates, is not here")
    path = tmp_path_factory.mktemp("certificate") / "both.pem"
    options = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=local -addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", str(path), "-out", str(path.with_suffix(".crt"))]
    subprocess.run(["openssl", *options.split(), *files], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + path.with_suffix(".crt").read_bytes())
    return path


def test_an_https_model_passes_through_a_tunnel_that_sees_nothing_of_it(
    folder: Path, proxy: LocalProxy, expected: torch.Tensor, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_suffix(".crt")))
    monkeypatch.setenv("https_proxy", proxy.url.replace("http://", "http://me:a%20word@"))
    monkeypatch.setenv("FIRSTLAYER_HTTP_AUTHORIZATION", "Bearer secret")
    proxy.wanted = "Basic bWU6YSB3b3Jk"  # base64 of "me:a word"
    with serving(folder, certificate=certificate) as server:
        assert torch.equal(logits(server.url), expected)
        port = server.server_address[1]
        assert all(headers["Authorization"] == "Bearer secret" for _, headers in server.requests)
        assert not any("Proxy-Authorization" in headers for _, headers in server.requests)
    assert set(proxy.lines) == {f"CONNECT 127.0.0.1:{port} HTTP/1.0"}
    assert not any(b"secret" in head for head in proxy.heads)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_proxy_that_wants_credentials_is_told_at_once(
    scheme: str, proxy: LocalProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy.url)
    proxy.wanted = "Basic xyz"
    with pytest.raises(CheckpointError, match=r"the proxy .*answers 407.*HTTPS_PROXY=http://user:password@host:port"):
        open_checkpoint(f"{scheme}://127.0.0.1:1/model/")
    assert len(proxy.lines) <= len(SMALL_FILES)  # one for each of the small files at most, and none of them again


def test_no_proxy_names_hosts_that_are_asked_themselves(
    server: RangeServer, proxy: LocalProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    monkeypatch.setenv("NO_PROXY", "example.org,127.0.0.1")
    open_checkpoint(server.url)
    assert proxy.lines == []


@pytest.mark.parametrize(
    ("variables", "host", "expected"),
    [
        ({"HTTP_PROXY": "http://p:3128"}, "h", Proxy("p", 3128)),
        ({"HTTP_PROXY": "p:3128"}, "h", Proxy("p", 3128)),
        ({"HTTPS_PROXY": "http://p:3128"}, "h", None),
        ({"HTTP_PROXY": "http://big", "http_proxy": "http://small"}, "h", Proxy("small", 80)),
        ({"ALL_PROXY": "http://p:1", "NO_PROXY": ".in.org"}, "a.in.org", None),
        ({"ALL_PROXY": "http://p:1", "NO_PROXY": ".in.org"}, "main.org", Proxy("p", 1)),
        ({"ALL_PROXY": "http://p:1", "NO_PROXY": "*"}, "h", None),
        ({"http_proxy": ""}, "h", None),
        ({}, "h", None),
    ],
)
def test_which_proxy_stands_before_a_host(
    variables: dict[str, str], host: str, expected: Proxy | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_for("http", host, 80) == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("socks5://p:1080", "HTTP_PROXY names no proxy that can be used: socks5:// is not spoken to a proxy"),
        ("https://p", "https:// is not spoken to a proxy, only http://"),
        ("http://p:99999", "HTTP_PROXY names no proxy that can be used: Port out of range"),
        ("http://", "host:port is needed"),
    ],
)
def test_a_variable_that_names_no_usable_proxy_is_a_wrong_option(
    value: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", value)
    with pytest.raises(OptionError, match=words):
        open_checkpoint("http://host/model/")


def test_a_proxy_that_is_not_there_is_named(proxy: LocalProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://nobody.invalid:3128")
    with pytest.raises(CheckpointError, match=r"the proxy nobody\.invalid:3128 is not known"):
        open_checkpoint("http://127.0.0.1:1/model/")

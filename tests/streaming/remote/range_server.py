"""A server of byte ranges on a local port, with every fault that a server or the way to it can have."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

Fault = Callable[["Handler"], bool]  # True: it has answered; False: answer as usual


class Handler(BaseHTTPRequestHandler):
    """Serves the files of the server's folder; `server.faults` are asked first."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each body waits 40 ms for the receipt of its headers
    server: RangeServer

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer one request."""
        with contextlib.suppress(ConnectionError):
            with self.server.lock:
                self.server.requests.append((self.path, dict(self.headers.items())))
            if not any(fault(self) for fault in list(self.server.faults)):
                self.answer()

    def answer(self, *, cut_after: int | None = None, extra: dict[str, str] | None = None) -> bool:
        """The file or its range, of which only `cut_after` bytes are sent before the connection ends."""
        path = self.server.folder / unquote(self.path.lstrip("/"))
        if not path.is_file():
            return self.reply(404)
        data = path.read_bytes()
        marks = self.server.marks(data) | (extra or {})
        if self.headers.get("If-None-Match", "-") == marks.get("ETag"):
            return self.reply(304, headers=marks)
        if "If-Match" in self.headers and self.server.checks and self.headers["If-Match"] != marks.get("ETag"):
            return self.reply(412)
        if "Range" in self.headers:
            first, last = self.bounds
            last = min(last, len(data) - 1)
            if first >= len(data):
                return self.reply(416, headers={"Content-Range": f"bytes */{len(data)}"})
            marks = {"Content-Range": f"bytes {first}-{last}/{len(data)}"} | marks
            return self.reply(206, data[first : last + 1], headers=marks, cut_after=cut_after)
        return self.reply(200, data, headers=marks, cut_after=cut_after)

    def reply(
        self, status: int, data: bytes = b"", *, headers: dict[str, str] | None = None, cut_after: int | None = None
    ) -> bool:
        """One answer, True; `cut_after` ends the connection within it."""
        self.send_response(status, HTTPStatus(status).phrase)
        for name, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data if cut_after is None else data[:cut_after])
        if cut_after is not None and cut_after < len(data):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        return True

    @property
    def wants_weights(self) -> bool:
        """Whether pieces of the plan are asked for: neither a header (it comes first) nor a row (128 bytes)."""
        first, last = self.bounds
        return self.path.endswith(".safetensors") and first > 0 and last - first != 127

    @property
    def bounds(self) -> tuple[int, int]:
        """First and last byte that are asked for."""
        first, _, last = self.headers.get("Range", "bytes=0-0").removeprefix("bytes=").partition("-")
        return int(first), int(last)


class RangeServer(ThreadingHTTPServer):
    """Serves a folder; what was asked for is kept in `requests`."""

    daemon_threads = True

    def __init__(self, folder: Path, *, certificate: Path | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.scheme = "http" if certificate is None else "https"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self.folder = folder
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.lock = threading.Lock()
        self.tells_etag = self.tells_date = True
        self.checks = True  # whether If-Match is looked at

    @property
    def url(self) -> str:
        """The folder's address."""
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}/"

    def marks(self, data: bytes) -> dict[str, str]:
        """The headers that tell one version from another."""
        etag = {"ETag": f'"{hashlib.sha256(data).hexdigest()[:16]}"'} if self.tells_etag else {}
        return etag | ({"Last-Modified": "Tue, 03 Mar 2026 10:00:00 GMT"} if self.tells_date else {})

    def asked(self, name: str) -> int:
        """How often a file was asked for."""
        return sum(path == f"/{name}" for path, _ in self.requests)

    def handle_error(self, *_: Any) -> None:
        """A client that goes away is no error of the server."""


@contextlib.contextmanager
def serving(folder: Path, *, certificate: Path | None = None) -> Iterator[RangeServer]:
    """A server of the folder for the length of the block; with a certificate (and its key) it speaks TLS."""
    server = RangeServer(folder, certificate=certificate)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def times(count: int, fault: Fault) -> Fault:
    """The fault, for the first `count` requests that it answers."""
    left = threading.Semaphore(count)

    def limited(handler: Handler) -> bool:
        if not left.acquire(blocking=False):
            return False
        answered = fault(handler)
        if not answered:
            left.release()
        return answered

    return limited

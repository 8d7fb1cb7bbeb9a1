"""Serve a model folder over HTTP in byte ranges, at a rate that a network might have.

    python examples/serve_throttled.py MODEL_FOLDER --mb-per-s 200 --port 8765
    firstlayer generate http://127.0.0.1:8765/ --prompt "The sea is"

All connections share the rate. ETag and Last-Modified are the file's size and date, so a change is noticed.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Sequence
from email.utils import formatdate
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

STEP_NBYTES = 256 << 10


class Throttle:
    """Shares one rate among all connections: whoever sends waits until its bytes are due."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._due_s, self._lock = bytes_per_s, 0.0, threading.Lock()

    def wait(self, nbytes: int) -> None:
        """Wait for these bytes' turn."""
        with self._lock:
            now_s = time.monotonic()
            self._due_s = max(self._due_s, now_s) + nbytes / self._bytes_per_s
            wait_s = self._due_s - now_s
        time.sleep(wait_s)


class Server(ThreadingHTTPServer):
    """Serves the files of one folder, never what lies outside it."""

    daemon_threads = True

    def __init__(self, folder: Path, *, port: int, bytes_per_s: float) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.folder, self.throttle = folder.resolve(), Throttle(bytes_per_s)


class Handler(BaseHTTPRequestHandler):
    """Answers GET with a whole file (200) or one range of it (206)."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each body waits 40 ms for the receipt of its headers
    server: Server

    def log_message(self, *_: Any) -> None:
        """Say nothing: a line for every range would be many."""

    def do_GET(self) -> None:
        """Send what was asked for, in steps that the throttle allows."""
        path = (self.server.folder / unquote(self.path.partition("?")[0]).lstrip("/")).resolve()
        if not path.is_relative_to(self.server.folder) or not path.is_file():
            self._head(HTTPStatus.NOT_FOUND, 0)
            return
        with path.open("rb") as file:
            self._send_file(file.fileno(), os.fstat(file.fileno()))

    def _send_file(self, descriptor: int, status: os.stat_result) -> None:
        size, etag = status.st_size, f'"{status.st_size:x}-{status.st_mtime_ns:x}"'
        marks = {"ETag": etag, "Last-Modified": formatdate(status.st_mtime, usegmt=True), "Accept-Ranges": "bytes"}
        if self.headers.get("If-Match", etag) != etag:
            self._head(HTTPStatus.PRECONDITION_FAILED, 0)
        elif self.headers.get("If-None-Match") == etag:
            self._head(HTTPStatus.NOT_MODIFIED, 0)
        elif bounds := self.headers.get("Range"):
            first, _, last = bounds.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last or size), size - 1) + 1
            if start >= size:
                self._head(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, 0, {"Content-Range": f"bytes */{size}"})
                return
            marks["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            self._head(HTTPStatus.PARTIAL_CONTENT, stop - start, marks)
            self._send(descriptor, start, stop)
        else:
            self._head(HTTPStatus.OK, size, marks)
            self._send(descriptor, 0, size)

    def _head(self, status: HTTPStatus, nbytes: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(nbytes), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, descriptor: int, start: int, stop: int) -> None:
        while start < stop:
            nbytes = min(STEP_NBYTES, stop - start)
            self.server.throttle.wait(nbytes)
            start += os.sendfile(self.connection.fileno(), descriptor, start, nbytes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mb-per-s", type=float, default=200.0, help="10^6 bytes a second, all connections together")
    parser.add_argument("--port", type=int, default=8765)
    options = parser.parse_args(arguments)
    server = Server(options.folder, port=options.port, bytes_per_s=options.mb_per_s * 1e6)
    print(f"http://127.0.0.1:{server.server_address[1]}/ serves {options.folder} at {options.mb_per_s:g} MB/s")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()

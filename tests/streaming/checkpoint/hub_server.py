"""A local server that speaks as much of the hub's API as its client needs, and can cut connections and refuse."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT, OLDER = "0123456789abcdef0123456789abcdef01234567", "f" * 40
_INFO = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/revision/(?P<revision>[^/]+)")
_TREE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass
class Repo:
    """One model: branch, tag or commit -> commit, and commit -> files."""

    commits: Mapping[str, Mapping[str, bytes]]
    names: Mapping[str, str]
    gated: bool = False


@dataclass
class Hub:
    """What the server has, what it is to do wrong, and what it was asked."""

    repos: dict[str, Repo] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)  # file -> bytes after which the connection ends, once
    stalls: dict[str, int] = field(default_factory=dict)  # file -> bytes after which nothing more comes until the end
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, range
    url: str = ""
    stalled: threading.Event = field(default_factory=threading.Event)  # a stall was reached
    ended: threading.Event = field(default_factory=threading.Event)

    def add(self, repo: str, files: Mapping[str, bytes], *, older: Mapping[str, bytes] | None = None) -> None:
        """A model whose branch main holds `files`; its tag v1 holds `older`."""
        self.repos[repo] = Repo(
            {COMMIT: dict(files), OLDER: dict(older or files)},
            {"main": COMMIT, "v1": OLDER, COMMIT: COMMIT, OLDER: OLDER},
        )

    def fetched(self) -> list[str]:
        """Names of the files whose bytes were asked for, sorted, each once."""
        files = [_FILE.fullmatch(path) for method, path, _ in self.requests if method == "GET"]
        return sorted({found["file"] for found in files if found})

    def ranges(self, file: str) -> list[str | None]:
        """The ranges that were asked of a file, in order."""
        return [asked for method, path, asked in self.requests if method == "GET" and path.endswith(f"/{file}")]


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Run it on a free port of this machine."""

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = _Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, *ignored: object) -> None:
        """A client that has gone is nothing to report."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *ignored: object) -> None:
        """Nothing on the screen."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        for pattern, answer in ((_INFO, self._info), (_TREE, self._tree), (_FILE, self._file)):
            if found := pattern.fullmatch(path):
                self._of_repo(found.groupdict(), answer)
                return
        self._error(404, "EntryNotFound")

    def _of_repo(self, asked: Mapping[str, str], answer: object) -> None:
        repo = self.hub.repos.get(asked["repo"])
        if repo is None:
            self._error(401, "RepoNotFound")  # as the hub does for whoever has no token
        elif asked["revision"] not in repo.names:
            self._error(404, "RevisionNotFound")
        elif repo.gated and answer == self._file:
            self._error(403, "GatedRepo")
        else:
            commit = repo.names[asked["revision"]]
            assert callable(answer)
            answer(asked, commit, repo.commits[commit])

    def _info(self, asked: Mapping[str, str], commit: str, files: Mapping[str, bytes]) -> None:
        siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
        self._json({"id": asked["repo"], "modelId": asked["repo"], "sha": commit, "siblings": siblings})

    def _tree(self, asked: Mapping[str, str], commit: str, files: Mapping[str, bytes]) -> None:
        self._json([{"type": "file", "path": n, "size": len(d), "oid": _etag(d)} for n, d in files.items()])

    def _file(self, asked: Mapping[str, str], commit: str, files: Mapping[str, bytes]) -> None:
        data = files.get(asked["file"])
        if data is None:
            self._error(404, "EntryNotFound")
            return
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(found[1]) if found else 0
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_etag(data)}"', "Accept-Ranges": "bytes"}
        if found:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(206 if found else 200, data[start:], headers, name=asked["file"])

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": f"refused: {code}"})

    def _send(self, status: int, data: bytes, headers: Mapping[str, str], *, name: str = "") -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if (cut := self.hub.cuts.pop(name, None)) is not None:
            self.wfile.write(data[:cut])
            self.close_connection = True  # fewer bytes than were promised
            return
        if (stall := self.hub.stalls.pop(name, None)) is not None:
            self.wfile.write(data[:stall])
            self.hub.stalled.set()
            self.hub.ended.wait(60)
            self.close_connection = True
            return
        self.wfile.write(data)


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()

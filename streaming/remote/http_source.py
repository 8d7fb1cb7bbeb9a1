"""Ranges over HTTP and HTTPS, with the standard library alone: the reader's process has nothing else. [no-torch]

Every answer is checked before a byte of it is taken: that it is a range (206) and the one that was asked for, that it
is not compressed, and that the file is still the version whose header was read (If-Match or If-Unmodified-Since in the
request, and ETag, Last-Modified and size in the answer, since many servers ignore the first).
"""

from __future__ import annotations

import http.client
import os
from collections.abc import Mapping
from urllib.parse import SplitResult, urljoin, urlsplit

from streaming.errors import CheckpointError, OptionError
from streaming.remote.address import HTTP_SCHEMES
from streaming.remote.faults import TransientError
from streaming.remote.http_answer import (
    AUTHORIZATION,
    check_failure,
    check_plain,
    check_status,
    check_version,
    http_fault,
    range_of,
    status_words,
)
from streaming.remote.proxy import Proxy, proxy_for, tunnel
from streaming.remote.source import Head

REDIRECTS = 5
_REDIRECT = (301, 302, 303, 307, 308)
_DRAIN_NBYTES = 1 << 16  # a longer rest of an answer costs more than a new connection

Origin = tuple[str, str, int]


class HttpSource:
    """One thread's connections, kept open from range to range."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._connections: dict[Origin, http.client.HTTPConnection] = {}
        self._targets: dict[str, str] = {}  # where an address led to last: saves the detour for every range
        self._authorization = _authorization()

    def open(self, url: str, *, start: int, stop: int, expected: Head | None) -> HttpBody:
        """Begin to read [start, stop) of a file; see `source.Source`."""
        headers = {"Range": f"bytes={start}-{stop - 1}", **_conditions(expected)}
        response, connection = self._get(url, headers)
        body = HttpBody(url, response, connection)
        try:
            check_status(url, response, expected)
            body.head, body.stop = range_of(url, response, start, stop)
            if expected is not None:
                check_version(url, body.head, expected)
        except BaseException:
            body.close()
            raise
        return body

    def whole(self, url: str, *, etag: str | None, limit: int) -> tuple[bytes, str | None] | None:
        """A small file; see `source.Source`."""
        response, connection = self._get(url, {"If-None-Match": etag} if etag else {})
        body = HttpBody(url, response, connection)
        try:
            if response.status == 304 and etag:
                return None
            check_failure(url, response)
            if response.status != 200:
                raise CheckpointError(f"{url}: the server answers {status_words(response)} where 200 was expected")
            check_plain(url, response)
            return _all_of(url, body, limit), response.getheader("ETag")
        finally:
            body.close()

    def close(self) -> None:
        """Close all connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _get(self, url: str, headers: Mapping[str, str]) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
        """The first answer that is no redirect."""
        target = self._targets.get(url, url)
        for _ in range(REDIRECTS + 1):
            response, connection = self._ask(url, target, headers)
            if response.status not in _REDIRECT:
                self._judge_target(url, target, response)
                return response, connection
            location = response.getheader("Location")
            HttpBody(url, response, connection).close()
            target = _next_target(url, target, location)
        raise CheckpointError(f"{url}: the server redirects more than {REDIRECTS} times, last to {_shown(target)}")

    def _judge_target(self, url: str, target: str, response: http.client.HTTPResponse) -> None:
        if target != url and response.status in (206, 200):
            self._targets[url] = target
        elif self._targets.pop(url, None) is not None and response.status in (400, 401, 403, 404, 410):
            response.close()  # a signed address has expired: the way begins anew at the address that was given
            raise TransientError(f"the address it redirected to answers {status_words(response)}", wait_s=0.0)

    def _ask(
        self, url: str, target: str, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPResponse, http.client.HTTPConnection]:
        parts = urlsplit(target)
        origin = _origin(parts)
        proxy = proxy_for(*origin)
        sent = {"Accept-Encoding": "identity", "User-Agent": "firstlayer", **headers}
        if self._authorization and origin == _origin(urlsplit(url)):  # a host we were sent to gets no credentials
            sent["Authorization"] = self._authorization
        asked = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
        if proxy is not None and parts.scheme == "http":
            asked, sent = f"http://{parts.netloc}{asked}", {**sent, **proxy.headers}
        connection = self._connections.setdefault(origin, self._connect(origin, proxy))
        reused = connection.sock is not None
        try:
            connection.request("GET", asked, headers=sent)
            return connection.getresponse(), connection
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if reused and isinstance(error, ConnectionError):  # servers close connections that were idle for long
                raise TransientError(f"the connection was closed: {error}", wait_s=0.0) from error
            raise http_fault(url, error, self._timeout_s, proxy=proxy) from error

    def _connect(self, origin: Origin, proxy: Proxy | None) -> http.client.HTTPConnection:
        scheme, host, port = origin
        if proxy is not None and scheme == "https":
            return tunnel(host, port, proxy=proxy, timeout_s=self._timeout_s)
        if proxy is not None:
            host, port = proxy.host, proxy.port
        kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        return kind(host, port, timeout=self._timeout_s)


class HttpBody:
    """The bytes of one answer."""

    def __init__(self, url: str, response: http.client.HTTPResponse, connection: http.client.HTTPConnection) -> None:
        self.head, self.stop = Head(0), 0
        self._url, self._response, self._connection = url, response, connection

    @property
    def missing(self) -> int | None:
        """Bytes that are announced and not read yet; None where nothing is announced."""
        return self._response.length

    def readinto(self, view: memoryview) -> int:
        """Some bytes; 0 at the end, be it the announced one or not."""
        try:
            return self._response.readinto(view)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise http_fault(self._url, error, self._connection.timeout) from error

    def close(self) -> None:
        """Keep the connection when the answer is at its end or nearly so."""
        rest = self._response.length
        try:
            if rest is not None and rest <= _DRAIN_NBYTES:
                self._response.read()
        except (OSError, http.client.HTTPException, ValueError):
            self._connection.close()
        if not self._response.isclosed():
            self._connection.close()
        self._response.close()


def _authorization() -> str | None:
    value = os.environ.get(AUTHORIZATION) or None
    if value is not None and not (value.isascii() and value.isprintable()):
        raise OptionError(f"{AUTHORIZATION} is not printable; a header's value is needed, as 'Bearer TOKEN'")
    return value


def _origin(parts: SplitResult) -> Origin:
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _conditions(expected: Head | None) -> dict[str, str]:
    if expected is None:
        return {}
    if expected.etag is not None:  # a weak one matches nothing by the strong comparison that If-Match asks for
        return {} if expected.etag.startswith("W/") else {"If-Match": expected.etag}
    return {} if expected.modified is None else {"If-Unmodified-Since": expected.modified}


def _next_target(url: str, target: str, location: str | None) -> str:
    if not location:
        raise CheckpointError(f"{url}: the server redirects and does not say where to")
    try:
        following = urljoin(target, location)
        parts = urlsplit(following)
        _origin(parts)
    except ValueError:
        raise CheckpointError(f"{url}: the server redirects to {location[:100]!r}, which is no address") from None
    if parts.scheme not in HTTP_SCHEMES or not parts.hostname or not following.isprintable() or " " in following:
        raise CheckpointError(f"{url}: the server redirects to {_shown(following)}, which is not followed")
    if urlsplit(target).scheme == "https" and parts.scheme != "https":
        raise CheckpointError(f"{url}: the server redirects from https to {_shown(following)}, which is not followed")
    return following


def _shown(target: str) -> str:
    """An address without its query, which may be a signature."""
    return ascii(target.partition("?")[0][:200])[1:-1]


def _all_of(url: str, body: HttpBody, limit: int) -> bytes:
    parts = bytearray()
    view = memoryview(bytearray(1 << 16))
    while got := body.readinto(view):
        parts += view[:got]
        if len(parts) > limit:
            raise CheckpointError(f"{url}: has more than {limit} bytes, which this file should not have")
    if body.missing:
        raise TransientError(f"the connection ended {body.missing} bytes early")
    return bytes(parts)

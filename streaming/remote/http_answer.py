"""What a server's HTTP answer says, checked before a byte of it is taken; and its faults in words. [no-torch]

RFC 9110 (https://www.rfc-editor.org/rfc/rfc9110), sections 8.8, 13.1, 14 and 15.
"""

from __future__ import annotations

import re
import socket
import time
from email.utils import parsedate_to_datetime
from http.client import HTTPResponse
from urllib.parse import urlsplit

from streaming.errors import CheckpointError
from streaming.remote.faults import RemoteForbiddenError, RemoteMissingError, TransientError, changed
from streaming.remote.proxy import Proxy, tunnel_fault
from streaming.remote.source import Head

AUTHORIZATION = "FIRSTLAYER_HTTP_AUTHORIZATION"  # an environment variable: the whole value of the header
_AGAIN = (408, 425, 429)  # and every 5xx
_PROXY_CREDENTIALS = "credentials go into its variable, as in HTTPS_PROXY=http://user:password@host:port"
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


def status_words(response: HTTPResponse) -> str:
    """The status in words."""
    return f"{response.status} {plain_words(response.reason)}".strip()


def plain_words(text: str | None) -> str:
    """A server's words, without what a terminal would obey."""
    return ascii((text or "")[:80])[1:-1]


def check_status(url: str, response: HTTPResponse, expected: Head | None) -> None:
    """Refuse whatever is no part (206) of the file, or is a part of another version."""
    if response.status == 206:
        return
    if response.status == 412:
        raise changed(url, "its ETag or date is another one")
    if response.status == 416:
        if expected is not None:
            raise changed(url, "it has become shorter")
        raise CheckpointError(f"{url}: is empty (0 bytes)")
    check_failure(url, response)
    if response.status == 200:
        _check_whole(url, response, expected)
        raise CheckpointError(
            f"{url}: the server ignores byte ranges (it answers 200 with the whole file where 206 with a part was "
            "asked for); remote loading needs them: use another server or download the model"
        )
    raise CheckpointError(f"{url}: the server answers {status_words(response)} where 206 was expected")


def check_failure(url: str, response: HTTPResponse) -> None:
    """Raise what the status says, where it says a failure."""
    status = response.status
    if status in (404, 410):
        raise RemoteMissingError(f"{url}: is not there (the server answers {status_words(response)})")
    if status in (401, 403):
        raise RemoteForbiddenError(
            f"{url}: may not be read (the server answers {status_words(response)}); credentials go into the "
            f"environment variable {AUTHORIZATION}, such as 'Bearer TOKEN'"
        )
    if status == 407:
        raise CheckpointError(f"{url}: the proxy answers {status_words(response)}; {_PROXY_CREDENTIALS}")
    if status in _AGAIN or status >= 500:
        wait_s = _retry_after(response.getheader("Retry-After"))
        raise TransientError(f"the server answers {status_words(response)}", wait_s=wait_s)


def _check_whole(url: str, response: HTTPResponse, expected: Head | None) -> None:
    """A whole file in place of a part is also how a server says that it is another version (If-Range)."""
    if expected is not None:
        length = response.getheader("Content-Length") or ""
        nbytes = int(length) if length.isdecimal() and len(length) < 19 else expected.nbytes
        check_version(url, Head(nbytes, response.getheader("ETag"), response.getheader("Last-Modified")), expected)


def check_plain(url: str, response: HTTPResponse) -> None:
    """Refuse a compressed file."""
    encoding = response.getheader("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise CheckpointError(
            f"{url}: the server sends it compressed (Content-Encoding: {plain_words(encoding)}), though asked not to; "
            "byte ranges of it cannot be used"
        )


def range_of(url: str, response: HTTPResponse, start: int, stop: int) -> tuple[Head, int]:
    """The file's head and where the answer ends; CheckpointError when it is another part than was asked for."""
    check_plain(url, response)
    told = response.getheader("Content-Range", "")
    found = _RANGE.fullmatch(told)
    first, last, nbytes = map(int, found.groups()) if found else (-1, -1, -1)
    if first != start or not start <= last < min(stop, nbytes):
        raise CheckpointError(f"{url}: bytes {start}-{stop - 1} were asked for, the server sends {told[:60]!r}")
    length = response.getheader("Content-Length")
    if length is not None and length != str(last + 1 - first):
        raise CheckpointError(
            f"{url}: the server sends bytes {first}-{last} and calls them {plain_words(length)} bytes (Content-Length)"
        )
    return Head(nbytes, response.getheader("ETag"), response.getheader("Last-Modified")), last + 1


def check_version(url: str, found: Head, expected: Head) -> None:
    """Refuse another version than the one whose header was read."""
    if found.nbytes != expected.nbytes:
        raise changed(url, f"it had {expected.nbytes} bytes and has {found.nbytes}")
    if found.etag != expected.etag:
        raise changed(url, f"its ETag was {plain_words(expected.etag)} and is {plain_words(found.etag)}")
    if expected.etag is None and found.modified != expected.modified:
        raise changed(url, f"it was last modified {plain_words(expected.modified)}, now {plain_words(found.modified)}")


def _retry_after(value: str | None) -> float | None:
    """Seconds from a Retry-After header: a number or a date; None when it is neither."""
    if not value:
        return None
    if value.strip().isdecimal():
        return float(value.strip()[:9])
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def http_fault(url: str, error: Exception, timeout_s: float | None, *, proxy: Proxy | None = None) -> Exception:
    """The error in words; what cannot become better by itself is not tried again."""
    way = "" if proxy is None else f" (by way of the proxy {proxy})"
    if isinstance(error, TimeoutError):
        return TransientError(f"nothing came for {timeout_s:g} s{way}")
    if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:
        host = f"host {urlsplit(url).hostname}" if proxy is None else f"proxy {proxy}"
        return CheckpointError(f"{url}: the {host} is not known ({error.strerror})")
    if isinstance(error, OSError) and (answer := tunnel_fault(error)) is not None:
        return _refused_by_proxy(url, answer, proxy)
    if type(error).__name__ == "SSLCertVerificationError":
        return CheckpointError(f"{url}: the server's certificate is not trusted: {error}")
    if isinstance(error, OSError):
        return TransientError(f"the connection failed{way}: {error.strerror or error}")
    return TransientError(f"the answer is not valid HTTP ({type(error).__name__}: {plain_words(str(error))})")


def _refused_by_proxy(url: str, answer: str, proxy: Proxy | None) -> Exception:
    words = f"the proxy {proxy} answers {plain_words(answer)} to being asked for a connection"
    if answer.startswith("407"):
        return CheckpointError(f"{url}: {words}; {_PROXY_CREDENTIALS}")
    return CheckpointError(f"{url}: {words}") if answer.startswith("4") else TransientError(words)

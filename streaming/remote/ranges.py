"""Ranges that arrive whatever happens on the way: tried again, from the byte that was reached. [no-torch]

An attempt that brings bytes is no failure in a row: only a server that gives nothing exhausts the attempts. `cuts` is
the limit of one that gives a little each time.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from streaming.checkpoint.remote_file import RemoteFile
from streaming.errors import CheckpointError, StreamClosedError
from streaming.remote.address import HTTP_SCHEMES
from streaming.remote.faults import TransientError
from streaming.remote.source import Head, Source

BUFFER_NBYTES = 256 << 10  # stays in a core's cache between the socket and where the bytes go


@dataclass(frozen=True)
class RetryPolicy:
    """How long to put up with a server."""

    attempts: int = 6  # in a row without a byte
    cuts: int = 64  # in one range, however many bytes each brings
    first_wait_s: float = 0.1  # doubled each time, and shortened by up to half at random
    longest_wait_s: float = 5.0
    longest_asked_s: float = 60.0  # the longest Retry-After that is waited for
    timeout_s: float = 20.0  # to connect, and for each read


class RangeFetcher:
    """One thread's way to remote files, with patience. `stop`: set by whoever wants it to end now."""

    def __init__(self, *, policy: RetryPolicy, stop: threading.Event | None = None) -> None:
        self._policy, self._stop = policy, stop or threading.Event()
        self._sources: dict[bool, Source] = {}
        self._buffer = memoryview(bytearray(BUFFER_NBYTES))

    def fetch(self, file: RemoteFile, start: int, stop: int, take: Callable[[memoryview], None]) -> None:
        """Hand bytes [start, stop) of a file to `take`, in order, each once.

        Raises CheckpointError naming the file: it changed, it may not be read, the server gave up on us or we on it.
        """
        self._fetch(file.url, start, stop, take, Head(file.nbytes, file.etag, file.modified))

    def fetch_first(self, url: str, nbytes: int) -> tuple[Head, bytes]:
        """The first bytes of a file that is not known yet (fewer where it is shorter), and what it is."""
        data = bytearray()
        head = self._fetch(url, 0, nbytes, data.extend, None)
        return head, bytes(data)

    def whole(self, url: str, *, etag: str | None, limit: int) -> tuple[bytes, str | None] | None:
        """A small file and its ETag, None when it still has the given one. Raises as `fetch` does."""
        failures = 0
        while True:
            try:
                return self._source(url).whole(url, etag=etag, limit=limit)
            except TransientError as fault:
                failures += 1
                self._rest(url, fault, failures, failures)

    def close(self) -> None:
        """Give connections back."""
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def _fetch(
        self, url: str, start: int, stop: int, take: Callable[[memoryview], None], expected: Head | None
    ) -> Head:
        at, failures, cuts = start, 0, 0
        while expected is None or at < stop:
            before = at
            try:
                with closing(self._source(url).open(url, start=at, stop=stop, expected=expected)) as body:
                    expected, stop = body.head, min(stop, body.head.nbytes)
                    while at < body.stop:
                        got = body.readinto(self._buffer[: body.stop - at])
                        if not got:
                            raise TransientError(f"the connection ended at byte {at} of {body.stop}")
                        take(self._buffer[:got])
                        at += got
                        if self._stop.is_set():
                            raise StreamClosedError("the model was closed while bytes were on their way")
            except TransientError as fault:
                failures, cuts = (1 if at > before else failures + 1), cuts + 1
                self._rest(url, fault, failures, cuts)
        return expected

    def _rest(self, url: str, fault: TransientError, failures: int, cuts: int) -> None:
        """Wait before the next attempt; raises CheckpointError when there is to be none."""
        policy = self._policy
        if failures >= policy.attempts or cuts >= policy.cuts:
            raise CheckpointError(f"{url}: {fault}; given up after {max(failures, cuts)} attempts") from fault
        wait_s = min(policy.longest_wait_s, policy.first_wait_s * 2 ** (failures - 1)) * random.uniform(0.5, 1)
        if fault.wait_s is not None:
            if fault.wait_s > policy.longest_asked_s:
                raise CheckpointError(f"{url}: {fault} and asks to wait {fault.wait_s:.0f} s; given up") from fault
            wait_s = fault.wait_s
        if self._stop.wait(wait_s):
            raise StreamClosedError("the model was closed while a server was waited for")

    def _source(self, url: str) -> Source:
        over_http = url.partition("://")[0] in HTTP_SCHEMES
        if over_http not in self._sources:
            self._sources[over_http] = _open_source(over_http, self._policy.timeout_s)
        return self._sources[over_http]


def _open_source(over_http: bool, timeout_s: float) -> Source:
    if over_http:
        from streaming.remote.http_source import HttpSource

        return HttpSource(timeout_s=timeout_s)
    from streaming.remote.object_source import ObjectSource

    return ObjectSource(timeout_s=timeout_s)

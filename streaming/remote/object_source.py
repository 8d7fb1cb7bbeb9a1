"""Ranges from object stores (s3://, gs://, az://), by way of the package obstore. [no-torch]

Keys, regions and endpoints come from the environment variables that the store's own tools use (AWS_ACCESS_KEY_ID,
AWS_REGION, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME and so on).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import unquote, urlsplit

from streaming.errors import CheckpointError, OptionError
from streaming.remote.faults import RemoteForbiddenError, RemoteMissingError, TransientError, changed
from streaming.remote.source import Head

_CHUNK_NBYTES = 1 << 20


class ObjectSource:
    """One thread's way to the buckets of object stores."""

    def __init__(self, *, timeout_s: float) -> None:
        try:
            import obstore
            import obstore.store
        except ImportError as error:
            raise OptionError(
                "addresses of object stores (s3://, gs://, az://) need the package obstore, which is not installed: "
                "pip install obstore"
            ) from error
        self._obstore: Any = obstore
        self._timeout_s = timeout_s
        self._stores: dict[str, Any] = {}

    def open(self, url: str, *, start: int, stop: int, expected: Head | None) -> ObjectBody:
        """Begin to read [start, stop) of an object; see `source.Source`."""
        options: dict[str, Any] = {"range": (start, stop)}
        if expected is not None and expected.etag is not None and not expected.etag.startswith("W/"):
            options["if_match"] = expected.etag
        found = self._call(url, lambda store, key: self._obstore.get(store, key, options=options))
        head = Head(int(found.meta["size"]), found.meta.get("e_tag"), str(found.meta["last_modified"]))
        if expected is not None and head != expected:
            raise changed(url, f"it was {_version(expected)} and is {_version(head)}")
        begin, end = found.range
        if begin != start or not start < end <= stop:
            raise CheckpointError(f"{url}: bytes {start}-{stop - 1} were asked for, the store sends {begin}-{end - 1}")
        return ObjectBody(url, head, end, found.stream(min_chunk_size=_CHUNK_NBYTES), self._fault)

    def whole(self, url: str, *, etag: str | None, limit: int) -> tuple[bytes, str | None] | None:
        """A small object; see `source.Source`."""
        found = self._call(url, lambda store, key: self._obstore.get(store, key))
        size, now = int(found.meta["size"]), found.meta.get("e_tag")
        if etag is not None and etag == now:
            return None
        if size > limit:
            raise CheckpointError(f"{url}: has {size} bytes; at most {limit} are read of this file")
        try:
            return bytes(found.bytes()), now
        except Exception as error:
            raise self._fault(url, error) from error

    def close(self) -> None:
        """Forget the stores; their connections go with them."""
        self._stores.clear()

    def _call(self, url: str, call: Callable[[Any, str], Any]) -> Any:
        parts = urlsplit(url)
        try:
            return call(self._store(f"{parts.scheme}://{parts.netloc}"), unquote(parts.path).lstrip("/"))
        except Exception as error:
            raise self._fault(url, error) from error

    def _store(self, bucket: str) -> Any:
        if bucket not in self._stores:
            timeout = timedelta(seconds=self._timeout_s)
            client: dict[str, Any] = {"connect_timeout": timeout, "read_timeout": timeout}
            if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
                client["allow_http"] = True
            self._stores[bucket] = self._obstore.store.from_url(
                bucket,
                client_options=client,
                retry_config={"max_retries": 0},  # retries are counted in one place
            )
        return self._stores[bucket]

    def _fault(self, url: str, error: Exception) -> Exception:
        kinds = self._obstore.exceptions
        words = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        if isinstance(error, (kinds.NotFoundError, FileNotFoundError)):
            return RemoteMissingError(f"{url}: is not there")
        if isinstance(error, (kinds.PermissionDeniedError, kinds.UnauthenticatedError)):
            return RemoteForbiddenError(f"{url}: may not be read ({words})")
        if isinstance(error, kinds.PreconditionError):
            return changed(url, "its ETag is another one")
        if isinstance(error, (kinds.UnknownConfigurationKeyError, kinds.NotSupportedError, ValueError)):
            return CheckpointError(f"{url}: {words}")
        return TransientError(words)


class ObjectBody:
    """The bytes of one answer of a store."""

    def __init__(
        self,
        url: str,
        head: Head,
        stop: int,
        chunks: Iterator[Any],
        fault: Callable[[str, Exception], Exception],
    ) -> None:
        self.head, self.stop = head, stop
        self._url, self._chunks, self._fault = url, iter(chunks), fault
        self._rest = memoryview(b"")

    def readinto(self, view: memoryview) -> int:
        """Some bytes; 0 at the end."""
        try:
            while not self._rest:
                chunk = next(self._chunks, None)
                if chunk is None:
                    return 0
                self._rest = memoryview(chunk).cast("B")
        except Exception as error:
            raise self._fault(self._url, error) from error
        nbytes = min(len(view), len(self._rest))
        view[:nbytes], self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return nbytes

    def close(self) -> None:
        """Drop what has not been read."""
        self._chunks, self._rest = iter(()), memoryview(b"")


def _version(head: Head) -> str:
    return f"{head.nbytes} bytes, ETag {head.etag}, modified {head.modified}"

"""The beginning of a file on a server, as far as its header's parser asks for it. [no-torch]"""

from __future__ import annotations

from streaming.checkpoint.files import stand_in
from streaming.checkpoint.remote_file import RemoteFile
from streaming.errors import CheckpointFormatError
from streaming.remote.ranges import RangeFetcher

FIRST_NBYTES = 256 << 10  # asked for at once: the whole header of all but the largest files


class HeaderBytes:
    """A file's bytes from the first one on. What the first answer said of its version, every later one must say."""

    def __init__(self, url: str, fetcher: RangeFetcher) -> None:
        """Raises CheckpointError naming the file, CheckpointFormatError where a small text stands in its place."""
        head, self._data = fetcher.fetch_first(url, FIRST_NBYTES)
        self.file = RemoteFile(url, head.nbytes, head.etag, head.modified)
        self._fetcher, self._taken = fetcher, 0
        if fault := stand_in(self._data[:256], self.file.nbytes):
            raise CheckpointFormatError(f"{url}: {fault}")

    def exactly(self, nbytes: int) -> bytes:
        """The next `nbytes` bytes."""
        self._have(self._taken + nbytes)
        self._taken += nbytes
        return self._data[self._taken - nbytes : self._taken]

    def more(self, nbytes: int) -> bytes:
        """All bytes that are here and were not taken, else the next `nbytes` or more: each request brings as much as
        there was before it, so that a header of unknown length takes few of them. b"" at the file's end."""
        if self._taken == len(self._data):
            self._have(min(self.file.nbytes, self._taken + max(nbytes, self._taken)))
        self._taken, begin = len(self._data), self._taken
        return self._data[begin:]

    def _have(self, end: int) -> None:
        if end > len(self._data):
            rest = bytearray()
            self._fetcher.fetch(self.file, len(self._data), end, rest.extend)
            self._data += rest

"""A weights file on a server: its address, and what would show that it has changed. [no-torch]"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True, order=True)
class RemoteFile:
    """Stands wherever a local file's path can: it has a name, and its text is its address.

    `etag` and `modified` are the server's own words (ETag, Last-Modified); every later answer must repeat them.
    """

    url: str
    nbytes: int
    etag: str | None = None
    modified: str | None = None
    copy_to: Path | None = None  # where a copy is to be kept while the file is read; None: nowhere

    @property
    def name(self) -> str:
        """The file's name without its folder."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])

    def __str__(self) -> str:
        return self.url


WeightFile = Path | RemoteFile

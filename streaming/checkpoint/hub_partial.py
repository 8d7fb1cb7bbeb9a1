"""Large files of the hub, taken up where an earlier run ended. [no-torch]

The client takes up a connection that is cut, and begins a file anew when its process was ended: what it had is named
after that process. Here a file that is fetched has a name that the next run finds, `blobs/<etag>.partial` in the hub's
cache; once whole it becomes `blobs/<etag>`, which the client then finds there and links
(https://huggingface.co/docs/huggingface_hub/guides/manage-cache). An etag is of one content, so a partial file never
goes on with another's bytes; what was taken up is held against its checksum all the same, since a crash may have lost
some of it. Files that come by way of hf_xet are left to the client.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import inspect
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from streaming.checkpoint.hub import HubId, is_true, repo_folder

LARGE_NBYTES = 32 << 20  # smaller files are fetched anew as quickly
_AT_ONCE = 4  # files
_ETAG = re.compile(r"[0-9a-zA-Z]{20,128}")  # it becomes a file's name
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NEEDED = {"resume_size", "headers", "expected_size", "_tqdm_bar"}  # what the client's function must take


@dataclass(frozen=True)
class RemoteBlob:
    """Where a file's bytes are."""

    url: str
    headers: dict[str, str]
    etag: str
    nbytes: int


def fetch_large(
    client: Any, model: HubId, names: Iterable[str], *, revision: str, endpoint: str | None, make_bar: Callable[[], Any]
) -> None:
    """Bring these files' bytes into the cache's blobs; those that are left out, the client fetches by itself.

    `revision`: a commit. `make_bar` gives what is told of bytes as they come (`update`, which may raise to end it)
    and of those that were there (`had`). Raises what the
    client raises; OSError where a file that was taken up is not what it should be.
    """
    if not can_resume(client):
        return
    blobs = repo_folder(model) / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)

    def fetch(name: str) -> None:
        remote = find_remote(client, model, name, revision=revision, endpoint=endpoint, over_xet=True)
        if remote is not None:
            fetch_one(client, remote, blobs, make_bar())

    each_at_once(names, fetch)


def each_at_once(names: Iterable[str], fetch: Callable[[str], None]) -> None:
    """Do it for several names at once. Raises what one of them raises; those that have not begun are left out then."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        futures = [pool.submit(fetch, name) for name in names]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
            wait(futures)


def find_remote(
    client: Any, model: HubId, name: str, *, revision: str, endpoint: str | None, over_xet: bool
) -> RemoteBlob | None:
    """Where the file is. None for what only the client can fetch, and, `over_xet`, for what it fetches faster."""
    url = client.hf_hub_url(model.repo, name, revision=revision, endpoint=endpoint)
    found = client.get_hf_file_metadata(url)
    by_xet = getattr(found, "xet_file_data", None) is not None and importlib.util.find_spec("hf_xet") is not None
    if over_xet and by_xet and not is_true(os.environ.get("HF_HUB_DISABLE_XET")):
        return None
    if found.etag is None or found.size is None or _ETAG.fullmatch(found.etag) is None:
        return None
    headers = client.utils.build_hf_headers()
    if urlsplit(found.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the token is for the hub alone
    return RemoteBlob(found.location, headers, found.etag, found.size)


def fetch_one(client: Any, remote: RemoteBlob, blobs: Path, bar: Any) -> None:
    """Bring a file's bytes to `blobs`/ETag, unless another process is at it. Raises as `fetch_large` does."""
    blob, partial = blobs / remote.etag, blobs / f"{remote.etag}.partial"
    if blob.exists():
        partial.unlink(missing_ok=True)
        return
    with FileIO(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # another process fetches it, or the file system has no locks: the client's own way is safe
        if blob.exists():
            return  # another one made it whole since, and this may be the very file
        had_nbytes = file.seek(0, os.SEEK_END)
        if had_nbytes > remote.nbytes:
            had_nbytes = file.truncate(0)
            file.seek(0)
        bar.had(had_nbytes)
        client.file_download.http_get(
            remote.url,
            file,
            resume_size=had_nbytes,
            headers=remote.headers,
            expected_size=remote.nbytes,
            _tqdm_bar=bar,
        )
        if had_nbytes and is_sha256(remote.etag) and digest_of(file) != remote.etag:
            partial.unlink()
            raise OSError(f"{partial}: what an earlier run left of it was wrong; it is removed, run it again")
        os.fsync(file.fileno())  # else a crash could leave a whole name on half the bytes
        os.replace(partial, blob)


def is_sha256(etag: str) -> bool:
    """Whether the etag is a checksum of the bytes, as it is of large files."""
    return _SHA256.fullmatch(etag) is not None


def digest_of(file: FileIO) -> str:
    """The SHA-256 of all its bytes."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()


def can_resume(client: Any) -> bool:
    """Whether the client's own function takes what is needed to go on with half a file."""
    return set(inspect.signature(client.file_download.http_get).parameters) >= _NEEDED

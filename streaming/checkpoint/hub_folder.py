"""A model of the hub in a plain folder (`download --local-dir`): a file has its name there once it is whole. [no-torch]

What is under way lies in a hidden folder inside, under the name of its content (its ETag), so the next run goes on with
it; the same folder notes which content each finished file has, so that it is known again without reading it. A file
that was put there by other means is read once and kept if it is what the hub has.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection
from io import FileIO
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any

from streaming.checkpoint.hub import HubId
from streaming.checkpoint.hub_partial import (
    RemoteBlob,
    can_resume,
    digest_of,
    each_at_once,
    fetch_one,
    find_remote,
    is_sha256,
)
from streaming.errors import CheckpointError

WORK = ".firstlayer-download"  # what is under way, and the notes
_NOTES = "notes.json"


def fetch_files(
    client: Any,
    model: HubId,
    names: Collection[str],
    folder: Path,
    *,
    commit: str,
    endpoint: str | None,
    make_bar: Callable[[], Any],
    done: Callable[[], None],
) -> None:
    """Bring these files into the folder. `make_bar`: as for `hub_partial.fetch_large`; `done` is called for each file.

    Raises what the client raises, OSError where the folder cannot be written, CheckpointError for names that lead out
    of it and for what another process is fetching there at the same time.
    """
    if not can_resume(client):
        raise CheckpointError("this needs a newer client: pip install -U huggingface_hub")
    for name in names:
        _check_name(name)
    work = folder / WORK
    work.mkdir(parents=True, exist_ok=True)
    notes = _Notes(work / _NOTES)

    def fetch(name: str) -> None:
        remote = find_remote(client, model, name, revision=commit, endpoint=endpoint, over_xet=False)
        if remote is None:
            raise CheckpointError(f"the hub tells neither size nor ETag of {name}")
        bar = make_bar()
        if _is_there(folder / name, remote, notes.of(name)):
            bar.had(remote.nbytes)
        else:
            _fetch(client, remote, work / _place(name), folder / name, bar)
        notes.add(name, _note(folder / name, remote))
        done()

    each_at_once(names, fetch)


def _place(name: str) -> str:
    """A folder of its own for each name: two may have the same content."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _fetch(client: Any, remote: RemoteBlob, own: Path, path: Path, bar: Any) -> None:
    own.mkdir(exist_ok=True)
    fetch_one(client, remote, own, bar)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.replace(own / remote.etag, path)
    except FileNotFoundError:
        raise CheckpointError(f"another process fetches {path} now; wait for it") from None
    for left in own.iterdir():
        left.unlink(missing_ok=True)  # of an older version of the file
    own.rmdir()


def _check_name(name: str) -> None:
    """The list of files is the server's word: none may lead out of the folder, or to what is under way in it."""
    parts = PurePosixPath(name).parts
    if name.startswith("/") or not parts or ".." in parts or "\\" in name or "\0" in name or parts[0] == WORK:
        raise CheckpointError(f"the hub names a file {name!r}, which leads out of the folder")


def _is_there(path: Path, remote: RemoteBlob, note: list[object] | None) -> bool:
    try:
        if path.stat().st_size != remote.nbytes:
            return False
        if note == _note(path, remote):
            return True
        with FileIO(path) as file:
            return is_sha256(remote.etag) and digest_of(file) == remote.etag
    except OSError:
        return False


def _note(path: Path, remote: RemoteBlob) -> list[object]:
    status = path.stat()
    return [remote.etag, status.st_size, status.st_mtime_ns]


class _Notes:
    """Name -> ETag, size and time of each finished file, on the disk; what cannot be read is no note."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, Lock()
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            found = {}
        self._notes: dict[str, list[object]] = found if isinstance(found, dict) else {}

    def of(self, name: str) -> list[object] | None:
        """The note, None where there is none."""
        return self._notes.get(name)

    def add(self, name: str, note: list[object]) -> None:
        """Keep it."""
        with self._lock:
            self._notes[name] = note
            beside = self._path.with_suffix(".new")
            beside.write_text(json.dumps(self._notes), encoding="utf-8")
            os.replace(beside, self._path)

"""The small files beside remote weights (config, index, tokenizer), kept in a private folder. [no-torch]

The server is asked each time whether they are still the same (ETag). Whoever reads them needs to know of no server:
the folder looks like a local model's, without the weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from streaming.checkpoint.members import CONFIG, INDEX
from streaming.errors import CheckpointError
from streaming.remote.address import member_url
from streaming.remote.faults import RemoteForbiddenError, RemoteMissingError
from streaming.remote.fetch_pool import FetchPool
from streaming.remote.ranges import RangeFetcher

CACHE = "FIRSTLAYER_CACHE"  # an environment variable: the folder of everything that is kept between runs
SMALL_FILES = (
    CONFIG, INDEX, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "chat_template.json",
    "quantize_config.json", "quant_config.json", "hf_quant_config.json",  # what weights are quantized by
)  # fmt: skip
SMALL_LIMIT = 64 << 20  # bytes of one of them; the largest tokenizers have 35 MB
_MARKS = ".etags.json"


def fetch_small_files(
    folder: str, *, pool: FetchPool, names: Sequence[str] = SMALL_FILES
) -> tuple[Path, tuple[str, ...]]:
    """Bring the small files of a remote folder up to date in its private local folder: that one, and notes.

    A file that is not there any more is removed here too. Raises CheckpointError where the server cannot be reached,
    where the config may not be read, and where nothing can be written.
    """
    root = private_folder(folder)
    marks = _read_marks(root / _MARKS)
    fetch: list[Callable[[RangeFetcher], _Found]] = [
        partial(_whole, member_url(folder, name), marks.get(name) if (root / name).is_file() else None)
        for name in names
    ]
    results = pool.run(fetch)
    kept, notes = {}, []
    for name, result in zip(names, results, strict=True):
        if isinstance(result, RemoteForbiddenError) and name != CONFIG:
            notes.append(f"{result}: the load goes on without it")
        elif isinstance(result, CheckpointError) and not isinstance(result, RemoteMissingError):
            raise result
        kept.update(_keep(root / name, result, marks.get(name)))
    _write(root / _MARKS, json.dumps(kept).encode())
    return root, tuple(notes)


def cache_folder() -> Path:
    """Where things are kept between runs: FIRSTLAYER_CACHE, else the user's own cache folder."""
    if named := os.environ.get(CACHE):
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "firstlayer"


def private_folder(folder: str) -> Path:
    """The local folder of a remote one, made when it is not there, for this user alone."""
    path = cache_folder() / "remote" / hashlib.sha256(folder.encode()).hexdigest()[:32]
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


_Found = tuple[bytes, str | None] | None


def _whole(url: str, etag: str | None, fetcher: RangeFetcher) -> _Found:
    return fetcher.whole(url, etag=etag, limit=SMALL_LIMIT)


def _keep(path: Path, result: _Found | CheckpointError, mark: str | None) -> dict[str, str]:
    """Bring one file up to date; its mark for the next time."""
    if isinstance(result, CheckpointError):
        path.unlink(missing_ok=True)
        return {}
    if result is None:
        return {path.name: mark} if mark else {}
    data, etag = result
    _write(path, data)
    return {path.name: etag} if etag else {}


def _read_marks(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}  # everything is fetched anew
    return {key: mark for key, mark in found.items() if isinstance(mark, str)} if isinstance(found, dict) else {}


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all, also where another process does the same."""
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path}: cannot be written ({error.strerror}); the small files of remote models are kept there; {CACHE} names "
        "another folder"
    )

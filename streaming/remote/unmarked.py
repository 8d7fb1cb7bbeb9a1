"""What to say of a server that does not tell one version of a file from the next. [no-torch]"""

from __future__ import annotations

from collections.abc import Iterable

from streaming.checkpoint.remote_file import RemoteFile, WeightFile


def unmarked_notes(files: Iterable[WeightFile]) -> list[str]:
    """A warning that names the first such file; none where all have marks."""
    for file in files:
        if isinstance(file, RemoteFile) and file.etag is None and file.modified is None:
            note = "the server tells neither its ETag nor its date: a change during the load would be noticed by its "
            return [f"{file.url}: {note}size alone"]
    return []

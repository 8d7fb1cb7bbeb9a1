"""Where the rows of a weight lie in files byte for byte as they are stored: runs that can be used there. [no-torch]"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from streaming.load_plan import LoadItem


class FileRun(NamedTuple):
    """Bytes of a local file."""

    file: Path
    offset: int
    nbytes: int


def file_runs(items: Sequence[LoadItem]) -> tuple[FileRun, ...]:
    """The runs that items lie in which fill a stored tensor from its first row to its last, in the order of its rows;
    () where any of them is not read as it is stored, in one run of a local file."""
    found: list[FileRun] = []
    for item in items:
        file = item.tensor.file
        is_run = item.nbytes > 0 and not item.stride_nbytes and not item.is_received
        if not (item.direct and isinstance(file, Path) and not item.tensor.generated and is_run):
            return ()
        last = found[-1] if found else None
        if last is not None and last.file == file and last.offset + last.nbytes == item.file_offset:
            found[-1] = last._replace(nbytes=last.nbytes + item.nbytes)
        else:
            found.append(FileRun(file, item.file_offset, item.nbytes))
    return tuple(found)

"""The format of torch.save before 1.6 (torch/serialization.py, `_legacy_save`): pickles, then storages. [no-torch]

The five pickles are a magic number, the protocol, facts of the machine, the object, and the storages' keys in the order
of their bytes: for each an 8-byte count of elements and the elements, little-endian on every machine.
"""

from __future__ import annotations

import os
from io import BytesIO, FileIO
from pathlib import Path

from streaming.checkpoint.pickle_reader import PICKLE_LIMIT, read_pickle
from streaming.checkpoint.pt_objects import Storage
from streaming.checkpoint.pt_zip import Member
from streaming.errors import CheckpointFormatError

_PROTOCOL = 1001
_COUNT_NBYTES = 8


def read_legacy(path: Path, file: FileIO, size: int) -> tuple[object, dict[str, Member]]:
    """The saved object, and the bytes of each storage by key. Raises CheckpointFormatError."""
    stream = BytesIO(os.pread(file.fileno(), min(size, PICKLE_LIMIT), 0))
    storages: dict[str, Storage] = {}
    try:
        _, protocol, _ = (read_pickle(stream) for _ in range(3))
        if protocol != _PROTOCOL:
            raise ValueError(f"its protocol is {str(protocol)[:40]}, {_PROTOCOL} is known")
        saved = read_pickle(stream, storages)
        keys = read_pickle(stream)
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
            raise ValueError("its list of storages is not a list of distinct names")
        members = _members(file, keys, storages, stream.tell(), size)
    except ValueError as error:
        raise CheckpointFormatError(f"{path}: {error}") from error
    return saved, members


def _members(file: FileIO, keys: list[str], storages: dict[str, Storage], at: int, size: int) -> dict[str, Member]:
    members = {}
    for key in keys:
        if (storage := storages.get(key)) is None:
            raise ValueError(f"storage {key[:40]!r} belongs to no tensor")
        start, end = at + _COUNT_NBYTES, at + _COUNT_NBYTES + storage.nbytes
        if end > size:
            raise ValueError(
                f"is cut short by {end - size} bytes (truncated): storage {key[:40]!r} ends at byte {end}, "
                f"the file has {size}; fetch it again"
            )
        count = int.from_bytes(os.pread(file.fileno(), _COUNT_NBYTES, at), "little")
        if count != storage.count:
            raise ValueError(f"storage {key[:40]!r} has {count} numbers, its pickle says {storage.count}")
        members[key] = Member(start, storage.nbytes)
        at = end
    if at != size:
        raise ValueError(f"{size - at} trailing bytes after the last storage")
    return members

"""The zip archive that torch.save writes: which bytes of the file are which member, parsed strictly. [no-torch]

Members are stored as they are, so a storage is a run of bytes of the file (PKWARE's APPNOTE 6.3.10, sections 4.3.7,
4.3.12 and 4.3.14 to 4.3.16). Whatever could make two readers disagree is refused: a name twice, members that overlap, a
local header that says something else than the directory.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from io import FileIO
from itertools import pairwise
from pathlib import Path

from streaming.errors import CheckpointFormatError

_END, _END_NBYTES = b"PK\x05\x06", 22
_LOCATOR, _LOCATOR_NBYTES = b"PK\x06\x07", 20
_END64, _END64_NBYTES = b"PK\x06\x06", 56
_ENTRY, _ENTRY_NBYTES = b"PK\x01\x02", 46
LOCAL, _LOCAL_NBYTES = b"PK\x03\x04", 30
_LONGEST_COMMENT = 0xFFFF
_DIRECTORY_LIMIT = 64 << 20  # bytes; 100,000 members take about 8 MB
_ZIP64, _IN_EXTRA = 1, 0xFFFFFFFF
_ENCRYPTED = 0x1


@dataclass(frozen=True, slots=True)
class Member:
    """A member's bytes."""

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line of the directory."""

    name: str
    nbytes: int
    header: int  # offset of the member's own header


def read_members(path: Path, file: FileIO, size: int) -> dict[str, Member]:
    """Every member of the archive by name, in the order of their bytes. Raises CheckpointFormatError."""
    try:
        count, start, nbytes = _directory(file, size)
        entries = _entries(_read(file, start, nbytes), count)
        members, spans = {}, []
        for entry in sorted(entries, key=lambda entry: entry.header):
            member = _member(file, entry, limit=start)
            if entry.name in members:
                raise ValueError(f"member {entry.name!r} is there twice")
            members[entry.name] = member
            spans.append((entry.header, member.offset + member.nbytes, entry.name))
        for (_, end, first), (begin, _, second) in pairwise(spans):
            if begin < end:
                raise ValueError(f"members {first!r} and {second!r} overlap")
    except (ValueError, struct.error) as error:
        raise CheckpointFormatError(f"{path}: its zip archive is not valid: {error}") from error
    return members


def _directory(file: FileIO, size: int) -> tuple[int, int, int]:
    """Members, offset and bytes of the directory, from the record at the file's end."""
    tail_nbytes = min(size, _END_NBYTES + _LONGEST_COMMENT)
    tail = _read(file, size - tail_nbytes, tail_nbytes)
    at = tail.rfind(_END)
    if at < 0 or len(tail) - at < _END_NBYTES:
        raise ValueError("it has no directory at its end (cut short: fetch the file again)")
    disk, first_disk, here, count, nbytes, start, comment = struct.unpack_from("<4H2IH", tail, at + 4)
    end = size - tail_nbytes + at
    if end + _END_NBYTES + comment != size:
        raise ValueError("its directory does not end where the file ends")
    if at >= _LOCATOR_NBYTES and tail[at - _LOCATOR_NBYTES :].startswith(_LOCATOR):
        end, (disk, first_disk, here, count, nbytes, start) = _directory64(file, tail[at - 12 : at - 4], end)
    if disk or first_disk or here != count:
        raise ValueError("it is a part of several")
    if start + nbytes > end or nbytes > _DIRECTORY_LIMIT or count * _ENTRY_NBYTES > nbytes:
        raise ValueError(f"a directory of {count} members in {nbytes} bytes at byte {start} is not possible here")
    return count, start, nbytes


def _directory64(file: FileIO, raw: bytes, end: int) -> tuple[int, tuple[int, ...]]:
    (at,) = struct.unpack("<Q", raw)
    if at + _END64_NBYTES > end:
        raise ValueError("its zip64 record lies outside the file")
    record = _read(file, at, _END64_NBYTES)
    if not record.startswith(_END64):
        raise ValueError("its zip64 record is not where the file says")
    return at, struct.unpack_from("<2I4Q", record, 16)


def _entries(directory: bytes, count: int) -> list[_Entry]:
    entries, at = [], 0
    for _ in range(count):
        if directory[at : at + 4] != _ENTRY or len(directory) < at + _ENTRY_NBYTES:
            raise ValueError(f"its directory is broken at byte {at}")
        flags, method = struct.unpack_from("<2H", directory, at + 8)
        packed, nbytes, name_nbytes, extra_nbytes, comment_nbytes, disk = struct.unpack_from(
            "<2I4H", directory, at + 20
        )
        (header,) = struct.unpack_from("<I", directory, at + 42)
        stop = at + _ENTRY_NBYTES + name_nbytes
        name = directory[at + _ENTRY_NBYTES : stop].decode("utf-8")
        extra = directory[stop : stop + extra_nbytes]
        nbytes, packed, header = _wide(extra, (nbytes, packed, header))
        if flags & _ENCRYPTED:
            raise ValueError(f"member {name!r} is encrypted, which is not supported")
        if method or packed != nbytes:
            raise ValueError(f"member {name!r} is compressed; torch.save stores members as they are: save it again")
        if disk:
            raise ValueError(f"member {name!r} is in another file")
        entries.append(_Entry(name, nbytes, header))
        at = stop + extra_nbytes + comment_nbytes
    if at != len(directory):
        raise ValueError("its directory is longer than its members need, or shorter")
    return entries


def _wide(extra: bytes, fields: tuple[int, int, int]) -> tuple[int, int, int]:
    """Sizes and offset, those that do not fit in 32 bits taken from the zip64 record."""
    if _IN_EXTRA not in fields:
        return fields
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, at)
        if kind == _ZIP64:
            record = extra[at + 4 : at + 4 + nbytes]
            numbers = iter(struct.unpack_from(f"<{fields.count(_IN_EXTRA)}Q", record))
            first, second, third = (next(numbers) if field == _IN_EXTRA else field for field in fields)
            return first, second, third
        at += 4 + nbytes
    raise ValueError("a member's zip64 record is missing")


def _member(file: FileIO, entry: _Entry, *, limit: int) -> Member:
    """Where a member's bytes begin, which only its own header says. `limit`: where the directory begins."""
    wanted = entry.name.encode()
    if entry.header + _LOCAL_NBYTES + len(wanted) > limit:
        raise ValueError(f"member {entry.name!r} lies outside the file")
    header = _read(file, entry.header, _LOCAL_NBYTES + len(wanted))
    (method,) = struct.unpack_from("<H", header, 8)
    name_nbytes, extra_nbytes = struct.unpack_from("<2H", header, 26)
    if not header.startswith(LOCAL) or method or header[_LOCAL_NBYTES:] != wanted or name_nbytes != len(wanted):
        raise ValueError(f"member {entry.name!r} is not where the directory says")
    offset = entry.header + _LOCAL_NBYTES + name_nbytes + extra_nbytes
    if offset + entry.nbytes > limit:
        raise ValueError(f"member {entry.name!r} lies outside the file")
    return Member(offset, entry.nbytes)


def _read(file: FileIO, offset: int, nbytes: int) -> bytes:
    raw = os.pread(file.fileno(), nbytes, offset)
    if len(raw) != nbytes:
        raise ValueError("it is cut short")
    return raw

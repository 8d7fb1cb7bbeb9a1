"""Bytes of tensors to and from the data file, piece by piece, under a running checksum. [no-torch]

The checksum is zlib's CRC-32: 3.2 GiB/s on one core where SHA-1 makes 1.3, SHA-256 1.2 and BLAKE2b 0.6, and other
threads run meanwhile, as they do while the system reads and writes. It finds what a disk or a crash did to the bytes;
it does not keep out whoever may write to the folder, who could change the model's own files just as well.
"""

from __future__ import annotations

import ctypes
import os
import time
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from streaming.past_cache import PastFile

PIECE_NBYTES = 16 << 20  # of one call
SETTLED_NS = 2_000_000_000  # times of files go in steps, of 2 s on some file systems


@dataclass(frozen=True)
class DataState:
    """What cannot stay the same when somebody changes the file, whoever it is: the system sets the time of the change
    before the bytes change, and no call sets it back. `is_settled`: a change that comes later shows, as the last one
    was further back than one step of the clock."""

    nbytes: int
    mtime_ns: int
    ctime_ns: int
    is_settled: bool = field(compare=False)


def data_state(descriptor: int) -> DataState:
    """The file as it is now. Raises OSError."""
    now_ns = time.time_ns()
    status = os.fstat(descriptor)
    settled = status.st_ctime_ns + SETTLED_NS <= now_ns
    return DataState(status.st_size, status.st_mtime_ns, status.st_ctime_ns, settled)


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor on the CPU, row after row; valid while the tensor is kept."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"a tensor on the CPU, row after row, is needed; this one is on {tensor.device}")
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())) if nbytes else memoryview(b"")


def read_whole(descriptor: int, memory: memoryview, *, offset: int, crc: int | None) -> int | None:
    """Fill the memory from the file; the checksum `crc` (None: none is wanted) carried on over it.

    Raises EOFError where the file ends before, OSError where it cannot be read.
    """
    done = 0
    while done < len(memory):
        piece = memory[done : done + PIECE_NBYTES]
        taken = os.preadv(descriptor, [piece], offset + done)
        if not taken:
            raise EOFError(f"the file ends at {offset + done}")
        crc = None if crc is None else zlib.crc32(piece[:taken], crc)
        done += taken
    return crc


class Read(Protocol):
    """What fills memory from the data file, as `read_whole` does."""

    def __call__(self, memory: memoryview, *, offset: int, crc: int | None) -> int | None:
        """Raises EOFError, OSError."""
        ...


def read_past(file: PastFile, memory: memoryview, *, offset: int, crc: int | None) -> int | None:
    """The same past the system's page cache."""
    import torch

    if not len(memory):
        return crc
    file.read(torch.frombuffer(memory, dtype=torch.uint8), offset=offset)
    return crc if crc is None else zlib.crc32(memory, crc)


def write_whole(descriptor: int, memory: memoryview, *, offset: int, crc: int) -> int:
    """Write the memory to the file; the checksum `crc` carried on over it. Raises OSError."""
    done = 0
    while done < len(memory):
        piece = memory[done : done + PIECE_NBYTES]
        taken = os.pwrite(descriptor, piece, offset + done)
        crc = zlib.crc32(piece[:taken], crc)
        done += taken
    return crc

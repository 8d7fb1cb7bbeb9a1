"""Bytes by way of fastsafetensors (`--load-format fastsafetensors`): its own threads read straight into their place.

The package (pip install fastsafetensors) is made for direct storage of GPUs; used here is its reader for machines
without (`nogds`), which reads any range of a file to any address. A read that fails or ends early gives 0.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence

from streaming.back_end_reading import Fetch, Wanted, main
from streaming.read_strategy import BUFFERS_NBYTES

_THREADS = 4
_BUFFER_KB = BUFFERS_NBYTES // _THREADS >> 10


def open_fetch(regions: Sequence[memoryview]) -> Fetch:
    """A reader that lives as long as the process. Raises ImportError without the package."""
    from fastsafetensors import cpp

    reader = cpp.nogds_file_reader(False, _BUFFER_KB, _THREADS, False, 0, -1)
    buffers = [
        cpp.gds_device_buffer(ctypes.addressof(ctypes.c_char.from_buffer(region)), len(region), False)
        if len(region)
        else None
        for region in regions
    ]

    def fetch(batch: Sequence[Wanted], held: Sequence[memoryview] = regions) -> Iterator[int]:
        """`held`: the buffers are addresses only, which keep no memory alive."""
        descriptors: dict[str, int] = {}
        try:
            for path in {wanted.path for wanted in batch}:
                descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            requests = [
                reader.submit_read(descriptors[each.path], buffers[each.region], each.offset, each.nbytes, each.dest)
                for each in batch
            ]
            results = [reader.wait_read(request) for request in requests]  # all: none may be under way at the end
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)
        yield from (wanted.index for wanted, result in zip(batch, results, strict=True) if result)

    return fetch


if __name__ == "__main__":
    main(open_fetch)

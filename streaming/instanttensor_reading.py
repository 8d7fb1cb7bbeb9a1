"""Bytes by way of InstantTensor (`--load-format instanttensor`): it reads tensors of safetensors files onto a GPU.

The package (pip install 'instanttensor>=0.2.2', https://github.com/scitix/InstantTensor) opens a file for tensors
chosen by name and gives them in the order of their bytes, each a copy of its own in the GPU's memory; from there they
are copied to their place in shared memory. It knows no ranges, so a tensor of which only a part has room yet stays on
the GPU until its next part is asked for: the pieces of one tensor follow each other in the plan, so that is one at a
time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from streaming.back_end_reading import Fetch, Wanted, main
from streaming.checkpoint.safetensors import read_safetensors_header
from streaming.checkpoint.tensors import TensorInfo


def open_fetch(regions: Sequence[memoryview], *, device: str) -> Fetch:
    """A reader onto this CUDA device (with its number), whose tensors are copied from there. Raises ImportError without
    the package."""
    import instanttensor
    import torch

    memory = [torch.frombuffer(region, dtype=torch.uint8) if len(region) else None for region in regions]
    files: dict[str, _Contents] = {}
    kept: dict[tuple[str, str], Any] = {}  # the tensor that the last batch ended in

    def tensors(path: str, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        if absent := [name for name in names if (path, name) not in kept]:
            with instanttensor.safe_open(
                [path], framework="pt", device=device, tensor_filter=absent, tensor_name_match_mode="exact"
            ) as opened:
                for name, tensor in opened.tensors():
                    yield name, tensor.contiguous().view(-1).view(torch.uint8)
        yield from [(name, tensor) for (file, name), tensor in kept.items() if file == path and name in names]

    def fetch(batch: Sequence[Wanted]) -> Iterator[int]:
        by_path: dict[str, list[Wanted]] = {}
        for wanted in batch:
            by_path.setdefault(wanted.path, []).append(wanted)
        last: dict[tuple[str, str], Any] = {}
        for path, group in by_path.items():
            if path not in files:
                files[path] = _Contents(path)
            places = [(wanted, files[path].tensor_at(wanted.offset)) for wanted in group]
            for name, tensor in tensors(path, list(dict.fromkeys(info.name for _, info in places))):
                for wanted, info in places:
                    if info.name == name:
                        start, into = wanted.offset - info.offset, memory[wanted.region]
                        assert into is not None
                        into[wanted.dest : wanted.dest + wanted.nbytes].copy_(tensor[start : start + wanted.nbytes])
                        yield wanted.index
                        if wanted is batch[-1] and start + wanted.nbytes < info.nbytes:
                            last[path, name] = tensor
        kept.clear()
        kept.update(last)

    return fetch


class _Contents:
    """Which tensor of a file a byte belongs to."""

    def __init__(self, path: str) -> None:
        self._tensors = [info for info in read_safetensors_header(Path(path)).values() if info.nbytes]
        self._starts = [info.offset for info in self._tensors]

    def tensor_at(self, offset: int) -> TensorInfo:
        """The tensor that has this byte."""
        return self._tensors[bisect_right(self._starts, offset) - 1]


def run(device: str) -> None:
    """Serve one job from standard input, by way of this device."""
    main(partial(open_fetch, device=device))

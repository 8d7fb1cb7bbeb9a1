"""Maps of files in which parameters stay (the `lazy` strategy): nothing is copied, pages come when they are used.

A file may be changed under its map: the new bytes show, and behind a new end an access ends the process (SIGBUS). So
size, time and identity of each file are compared with what was planned whenever the map is opened and whenever a layer
(of streamed weights: a unit, see streaming.file_maps) is leased: one call of the system per file and layer. What
remains is a change *within* a step of one layer. Who cannot rule that out uses another strategy: all others copy, or
use only what the system keeps as it is (streaming.file_leases).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from streaming.errors import CheckpointError
from streaming.file_faults import system_fault
from streaming.open_files import FileState, state_of
from streaming.plan import LoadPlan
from streaming.read_plan import ReadPlan, Region

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # copies are never made: no memory is set aside for them


class KeptMaps:
    """One map of each file in which parameters stay, and which layers lie in which file."""

    def __init__(self, plan: LoadPlan, read_plan: ReadPlan) -> None:
        """Raises CheckpointError for a file that cannot be opened or has changed since it was planned."""
        self.files = sorted({file for file, _ in read_plan.mapped.values()})
        self._paths = {file: Path(str(read_plan.files[file])) for file in self.files}
        self._descriptors: dict[int, int] = {}
        self._states: dict[int, FileState] = {}
        self._layers = _files_of_layers(plan, read_plan)
        self.maps: Mapping[int, mmap.mmap] = {}
        try:
            for file in self.files:
                self._open(file, read_plan.states)
            self.maps = {file: self._map(file) for file in self.files}
        except BaseException:
            self.close()
            raise

    def check(self, layer: str) -> None:
        """Raise CheckpointError when a file of the layer is not what it was."""
        for file in self._layers.get(layer, ()):
            self._check(file)

    def close(self) -> None:
        """Give the descriptors back; the maps go with their last user."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self.maps = {}

    def _open(self, file: int, states: tuple[FileState, ...]) -> None:
        try:
            self._descriptors[file] = os.open(self._paths[file], os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(system_fault(self._paths[file], error.errno)) from error
        self._states[file] = states[file] if states else state_of(os.fstat(self._descriptors[file]))
        self._check(file)

    def _check(self, file: int) -> None:
        descriptor = self._descriptors.get(file)
        if descriptor is None:
            return  # closed: nobody computes any more
        found, planned = state_of(os.fstat(descriptor)), self._states[file]
        if found == planned:
            return
        how = f"has {found[2]:,} bytes in place of {planned[2]:,}" if found[2] != planned[2] else "was written to"
        raise CheckpointError(
            f"{self._paths[file]} {how} since the load was planned, and its weights are used where they lie in it "
            "(--safetensors-load-strategy lazy); load the model again"
        )

    def _map(self, file: int) -> mmap.mmap:
        try:
            return private_map(self._descriptors[file], self._states[file][2])
        except OSError as error:
            raise CheckpointError(system_fault(self._paths[file], error.errno)) from error


def private_map(descriptor: int, nbytes: int, *, offset: int = 0) -> mmap.mmap:
    """A map of a file, private and writable: a stray write would change a copy of the page, never the file.

    Raises OSError, ValueError.
    """
    flags, prot = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    return mmap.mmap(descriptor, nbytes, offset=offset, flags=flags, prot=prot)


def _files_of_layers(plan: LoadPlan, read_plan: ReadPlan) -> dict[str, Iterable[int]]:
    layers = [item.layer for item in plan.items]
    found: dict[str, set[int]] = {}
    for piece in read_plan.pieces:
        if piece.region is Region.MAPPED:
            found.setdefault(layers[piece.item], set()).add(piece.file)
    return {layer: sorted(files) for layer, files in found.items()}

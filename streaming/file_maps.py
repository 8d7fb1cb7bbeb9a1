"""The files of one model as maps, one of each, and the leases that keep them whole while they are used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch

from streaming.file_leases import FileLeases
from streaming.file_runs import FileRun
from streaming.file_views import FileView, map_run
from streaming.open_files import OpenFiles

Fault = Callable[[int | str], BaseException]
"""The error that a number of the system, or a word (see streaming.pipeline.read_fault), stands for."""


class FileMaps:
    """Views of runs of files. `unleased`: also of a file that cannot be leased, whose bytes are compared with nothing
    between `enter` and the end of a product: cut short just then, it ends the process."""

    def __init__(self, files: OpenFiles, *, unleased: bool) -> None:
        self._files, self._unleased, self._leases = files, unleased, FileLeases()
        self._maps: dict[int, torch.Tensor] = {}
        self._views: dict[FileRun, FileView] = {}
        self._were_leased: set[int] = set()
        self._lock = threading.Lock()

    def may_view(self, number: int, descriptor: int) -> bool:
        """Whether the file's bytes may be used where they lie."""
        if self._leases.take(number, descriptor, self._files.state(number)):
            self._were_leased.add(number)
            return True
        return self._unleased and number not in self._were_leased

    def leased_view(self, run: FileRun, number: int) -> tuple[FileView, int] | None:
        """The run's view and a descriptor of its file, where it was made before and nobody can have written to it."""
        view, descriptor = self._views.get(run), self._leases.descriptor(number)
        return None if view is None or descriptor is None else (view, descriptor)

    def view(self, run: FileRun, number: int, descriptor: int, *, fault: Fault) -> FileView | None:
        """The run's view: one for all times; None where it cannot be had. `number`, `descriptor`: the file's; `fault`
        makes the errors of its use."""
        if not self.may_view(number, descriptor):
            return None
        with self._lock:
            if run not in self._views:
                if number not in self._maps:
                    memory = map_run(descriptor, 0, self._files.nbytes(number))
                    if memory is None:
                        return None
                    self._maps[number] = memory
                memory = self._maps[number][run.offset : run.offset + run.nbytes]
                enter, may_be_used = partial(self._enter, number, fault), partial(self._may_be_used, number)
                self._views[run] = FileView(memory, number, enter, may_be_used)
            return self._views[run]

    def _may_be_used(self, number: int) -> bool:
        if number in self._were_leased:
            return self._leases.descriptor(number) is not None
        return self._unleased

    def _enter(self, number: int, fault: Fault) -> Callable[[], None] | None:
        """Begin to use the file. Raises what `fault` makes where it is not what it was, or will not stay so."""
        leave = partial(self._leases.leave, number)
        if self._leases.enter(number):  # nobody has written to it since it was leased
            return leave
        if (error := self._files.fault(number)) is not None:
            raise fault(error)
        if number not in self._were_leased or self._leases.is_closed:
            return None
        if self._lease_again(number) and self._leases.enter(number):
            return leave
        raise fault(f"{self._files.path(number)} is opened for writing by somebody, and its weights are used in it")

    def _lease_again(self, number: int) -> bool:
        """Whether a file that was given back to a writer can be leased: who opened it has closed it."""
        try:
            descriptor = self._files.take(number)
        except OSError:
            return False
        try:
            return self.may_view(number, descriptor)
        finally:
            self._files.give_back(number, pieces=0)

    def close(self) -> None:
        """Give the leases back; the maps go with their last user."""
        self._leases.close()
        self._views.clear()
        self._maps.clear()

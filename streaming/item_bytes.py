"""The bytes of any item of a plan, on demand and from any thread: files of this machine, addresses, made-up weights."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch

from streaming.checkpoint.remote_file import RemoteFile, WeightFile
from streaming.dummy_pattern import fill_patterns
from streaming.errors import LayerLoadError, StreamClosedError
from streaming.file_maps import FileMaps
from streaming.file_ranges import FileRanges, open_ranges
from streaming.file_runs import FileRun
from streaming.file_views import Came, view_run
from streaming.load_plan import LoadItem
from streaming.open_files import CHANGED, FileState, OpenFiles
from streaming.page_cache import O_DIRECT, drop, is_cached
from streaming.past_cache import PastCache
from streaming.piece_cutting import cut_pieces
from streaming.pipeline import read_fault
from streaming.read_choice import states_of
from streaming.reading import SHORT, FlatPiece, fill_checked, fill_memory, put_own

_EVER = 1 << 62
_FAULTS = {SHORT: "short", CHANGED: "changed"}


class ItemBytes:
    """A file is opened for its first piece and closed behind its last, where each item is read once."""

    def __init__(
        self, numbers: Mapping[WeightFile, int], files: OpenFiles | None, *, past: PastCache | None = None,
        unleased: bool = False,
    ) -> None:  # fmt: skip
        """`files`: those of this machine, by their numbers; None where weights are made up, or come from an address.
        `past`: the same, to be read past the page cache. `unleased`: see FileMaps."""
        self._numbers, self._files, self._past = numbers, files, past
        self._ranges: dict[WeightFile, FileRanges] = {}
        self._maps = None if files is None else FileMaps(files, unleased=unleased)
        self._lock, self._closed = threading.Lock(), False

    def read(self, item: LoadItem, into: torch.Tensor | None = None) -> torch.Tensor:
        """The item's bytes: uint8 [nbytes] on the CPU, those of `into` where that is given.

        Raises LayerLoadError, or CheckpointError of a server; StreamClosedError when it is cancelled.
        """
        raw = _memory_of(item, into)
        if not item.nbytes:
            return raw
        memory = memoryview((ctypes.c_char * item.nbytes).from_address(raw.data_ptr())).cast("B")
        pieces = list(_pieces_of(item, self._numbers[item.tensor.file]))
        file = item.tensor.file
        if isinstance(file, RemoteFile):
            self._fetch(file, pieces, memory)
        else:
            self._fill(item, pieces, memory)
        return raw

    def _fill(self, item: LoadItem, pieces: Sequence[FlatPiece], memory: memoryview) -> None:
        if self._files is None:
            fill = fill_patterns([str(file.name) for file in self._numbers], [memory])
        else:
            fill = fill_checked(self._files, fill_memory([memory]))
        self._through(item, pieces, lambda piece: fill(piece.file, piece))

    def _through(self, item: LoadItem, pieces: Iterable[FlatPiece], fill: Callable[[FlatPiece], int | None]) -> bool:
        """Fill one piece after the other; False where `fill` gives None: it cannot."""
        for piece in pieces:
            if self._closed:
                raise StreamClosedError("the model was closed while a weight was read")
            try:
                code = fill(piece)
            except OSError as error:
                raise _failure(item, error.errno or 0) from error
            if code is None:
                return False
            if code:
                raise _failure(item, _FAULTS[code])
        return True

    def _fetch(self, file: RemoteFile, pieces: Sequence[FlatPiece], memory: memoryview) -> None:
        with self._lock:
            if self._closed:
                raise StreamClosedError("the model was closed while an expert was fetched")
            if file not in self._ranges:
                self._ranges[file] = open_ranges(file)
            ranges = self._ranges[file]
        found = ranges.read([(piece.offset, piece.span_nbytes) for piece in pieces])
        for piece, data in zip(pieces, found, strict=True):
            put_own(memoryview(data), piece, memory)

    def read_by(self, item: LoadItem, into: torch.Tensor | None = None) -> torch.Tensor:
        """The same, and the item's bytes do not stay in the system's page cache, unless they were there before, for
        whoever wants them. Past the cache where the system reads so, which spares it the work with its pages."""
        if self._files is None or not item.nbytes:
            return self.read(item, into)
        file = self._numbers[item.tensor.file]
        descriptor = self._files.take(file)
        try:
            if is_cached(descriptor, item.file_offset, item.nbytes):
                return self.read(item, into)
            past = self._past
            if past is not None and not item.stride_nbytes and past.is_open:
                raw = _memory_of(item, into)
                if self._through(item, _pieces_of(item, file), lambda piece: past.fill(piece, raw)):
                    return raw
            raw = self.read(item, into)
            drop(descriptor, item.file_offset, item.nbytes)
            return raw
        finally:
            self._files.give_back(file, pieces=0)

    def may_view(self, run: FileRun, *, reads: bool) -> bool:
        """Whether a run of a local file can be used where it lies: it is in the page cache, unless it is read then, and
        its file may be used so."""
        if self._files is None or self._maps is None:
            return False
        number = self._numbers[run.file]
        try:
            descriptor = self._files.take(number)
        except OSError:
            return False
        try:
            is_there = reads or is_cached(descriptor, run.offset, run.nbytes)
            return is_there and self._maps.may_view(number, descriptor)
        finally:
            self._files.give_back(number, pieces=0)

    def view(self, item: LoadItem, run: FileRun, *, before: Callable[[], None], reads: bool = False) -> Came | None:
        """A run of a local file where it lies in the page cache; None where it is not there whole, or the file is not
        what it was. `item`: the first of the run, which errors name; `before`, `reads`: see `view_run`."""
        if self._files is None or self._maps is None:
            return None
        files, number = self._files, self._numbers[run.file]
        if (leased := self._maps.leased_view(run, number)) is not None:
            view, descriptor = leased
            return view_run(view, descriptor, run.offset, before=before, reads=reads)
        try:
            descriptor = files.take(number)
        except OSError:
            return None
        made = self._maps.view(run, number, descriptor, fault=partial(_failure, item))
        found = None if made is None else view_run(made, descriptor, run.offset, before=before, reads=reads)
        return None if files.give_back(number, pieces=0) else found

    def cancel(self) -> None:
        """Make whoever reads in another thread leave soon."""
        with self._lock:
            self._closed = True
            ranges = list(self._ranges.values())
        for one in ranges:
            one.cancel()

    def close(self) -> None:
        """Give back what was opened."""
        self.cancel()
        for one in self._ranges.values():
            one.close()
        if self._maps is not None:
            self._maps.close()
        if self._files is not None:
            self._files.close()
        if self._past is not None:
            self._past.close()


def open_item_bytes(
    items: Sequence[LoadItem], states: Mapping[WeightFile, FileState], *, again: bool = False, unleased: bool = False
) -> ItemBytes:
    """For these items; `states`: of local files when the load was planned, where that is known. Opens no file.
    `again`: each may be read any number of times, so that files stay open, and nothing is read ahead: what lies behind
    an item may be another's that nobody wants (measured: an eighth more bytes of the disk). `unleased`: see FileMaps.

    Raises CheckpointError for one that is gone.
    """
    uses = Counter[WeightFile]()
    for item in items:
        uses[item.tensor.file] += sum(1 for _ in _pieces_of(item, 0))
    numbers = {file: number for number, file in enumerate(uses)}
    if any(isinstance(file, RemoteFile) for file in uses) or any(item.tensor.generated for item in items):
        return ItemBytes(numbers, None)
    known = [states.get(file) or states_of([file])[0] for file in uses]
    left = [_EVER if again else count for count in uses.values()]
    paths = [str(file) for file in uses]
    past = PastCache(OpenFiles(paths, known, left, flags=O_DIRECT)) if again and O_DIRECT else None
    return ItemBytes(numbers, OpenFiles(paths, known, left, exactly=again), past=past, unleased=unleased)


def _memory_of(item: LoadItem, into: torch.Tensor | None) -> torch.Tensor:
    """uint8 [nbytes]: of its own, or that of `into`."""
    return torch.empty(item.nbytes, dtype=torch.uint8) if into is None else into.view(-1).view(torch.uint8)


def _failure(item: LoadItem, error: int | str) -> LayerLoadError:
    return LayerLoadError(item.layer, "read", item.tensor.name, read_fault(item, error))


def _pieces_of(item: LoadItem, file: int) -> Iterator[FlatPiece]:
    for start, before, size, stride in cut_pieces(item.nbytes, item.run_nbytes, item.stride_nbytes):
        run = item.run_nbytes if stride else 0
        yield FlatPiece(file, item.file_offset + start, size, 0, before, 0, run, stride)

"""The stored cache of one model: units are put while they are made, and loaded on later passes and in later runs.
[no-torch]

A unit is appended to the data file and then to the journal, so that what the journal names was written before: a
process that is killed loses the units that it had not finished, and nothing else. The data is synced to the disk every
256 MiB and at the end: a machine that loses its power may lose what came after the last sync, which shows by the units'
checksums. Bytes of a committed unit are never written over. A unit's checksum is verified when it is loaded, and not
again while the file stays as it was then: its size and times are looked at before and after each read. Whoever changes
it, be it this process that puts a unit, makes all units be verified once more.
"""

from __future__ import annotations

import errno
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from streaming.errors import CheckpointError
from streaming.page_cache import drop, is_cached
from streaming.sizes import format_size
from streaming.stored_cache.data_file import (
    DataState,
    Read,
    byte_view,
    data_state,
    read_past,
    read_whole,
    write_whole,
)
from streaming.stored_cache.eviction import DATA, make_room, remove_model
from streaming.stored_cache.folder import ModelFolder, open_model_folder
from streaming.stored_cache.journal import (
    MOST_JOURNAL_NBYTES,
    CachedTensor,
    CachedUnit,
    aligned,
    holds_same,
    journal_line,
    place,
)
from streaming.stored_cache.key import THIS_RUN, key_bytes, key_word

if TYPE_CHECKING:
    import torch

    from streaming.file_views import FileView
    from streaming.past_cache import PastFile

SYNC_NBYTES = 256 << 20


class CacheFullError(OSError):
    """What is to be kept does not fit under the limit; the message holds the numbers."""


class CacheCutError(OSError):
    """The data file is shorter than what was written to it; the message holds both sizes."""


def open_stored_cache(
    folder: Path, key: Mapping[str, object], *, limit_nbytes: int, warn: Callable[[str], None]
) -> StoredCache:
    """Open what is kept under this key in the cache folder, for writing where no other process writes it.

    `limit_nbytes` is for all models in the folder together: others that nobody has open make room, the least recently
    opened first; 0 keeps and reads nothing. Whatever is wrong with the folder ends in a cache that keeps nothing, and
    in one line for `warn`.
    """
    path = folder / key_word(key)
    if limit_nbytes <= 0:
        return StoredCache(path, None, limit_nbytes=0, warn=warn)
    try:
        model = open_model_folder(path, key=key_bytes(key))
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        warn(f"the stored cache {path} cannot be used ({_words(error)}): what is quantized is not kept on disk")
        return StoredCache(path, None, limit_nbytes=limit_nbytes, warn=warn)
    if model.writes:
        with suppress(OSError):
            make_room(folder, limit_nbytes=limit_nbytes)
    elif model.held_by_other:
        warn(f"another process writes the stored cache {path}: this one reads what is there and keeps nothing more")
    else:
        warn(f"the stored cache {path} cannot be written: what is not there yet is not kept")
    return StoredCache(path, model, limit_nbytes=limit_nbytes, warn=warn, only_this_run=THIS_RUN in key)


class StoredCache:
    """See the module. All methods may be called from several threads at once; after `close` they find nothing."""

    def __init__(
        self,
        path: Path,
        model: ModelFolder | None,
        *,
        limit_nbytes: int,
        warn: Callable[[str], None],
        only_this_run: bool = False,
    ) -> None:
        """`model`: the open folder, which is closed with the cache; None: nothing is there and nothing is kept."""
        self._path, self._model, self._warn, self._only_this_run = path, model, warn, only_this_run
        self.limit_nbytes, self.written_nbytes = limit_nbytes, 0
        self._units = {} if model is None else dict(model.units)
        self._writes = model is not None and model.writes
        self._end = self._kept_end = 0 if model is None else model.end  # of what is given out; of what is committed
        self._changed = threading.Condition()
        self._users = 0  # calls that use the descriptors
        self._writing: set[str] = set()
        self._verified: dict[CachedUnit, DataState] = {}  # and the file's state before and after
        self._last_stop = max((unit.stop for unit in self._units.values()), default=0)
        self._unsynced: set[str] = set()
        self._unsynced_nbytes = 0
        self._past: PastFile | None = None  # the data file, to be read past the page cache
        self._drop_later: dict[str, CachedUnit] = {}  # a page goes only when it is on the disk

    # --- what is there

    @property
    def file(self) -> Path:
        """The data file; it may not be there where nothing was ever kept."""
        return self._path / DATA

    @property
    def is_writing(self) -> bool:
        """Whether `put` keeps anything: no other process writes, and nothing has failed."""
        return self._writes

    @property
    def nbytes(self) -> int:
        """Bytes of the units that are there."""
        with self._changed:
            return sum(unit.nbytes for unit in self._units.values())

    def holds(self, unit: str) -> bool:
        """Whether the unit is there, as far as the journal says."""
        with self._changed:
            return unit in self._units

    def tensors(self, unit: str) -> tuple[CachedTensor, ...]:
        """Where the unit's tensors lie in the file; () where it is not there. Whoever reads them there by other means
        does so unverified: `load` it once before."""
        with self._changed:
            found = self._units.get(unit)
        return () if found is None else found.tensors

    # --- reading

    def load(self, unit: str, into: Mapping[str, torch.Tensor], *, past: bool = False) -> bool:
        """Fill the tensors (on the CPU, row after row) from the disk: whether they hold the unit now. `past`: past the
        system's page cache, unless the unit is there, or dropped from it behind where that cannot be.

        False where it is not there, has other tensors than these by name, dtype or shape, or is not what was written:
        then it is forgotten, may be put again, and the tensors hold anything.
        """
        memory = {name: byte_view(tensor) for name, tensor in into.items()}
        with self._using() as model:
            with self._changed:
                found = self._units.get(unit)
            if model is None or found is None:
                return False
            passes = past and not is_cached(model.data, found.start, found.stop - found.start)
            read = self._past_reader(model) if passes else None
            through = read or partial(read_whole, model.data)
            good = holds_same(found, into) and self._filled(model, found, memory, through)
            with self._changed:
                if not good:
                    self._verified.pop(found, None)
                    if self._units.get(unit) is found:
                        del self._units[unit]
            if passes and read is None:
                self.drop_behind(unit)
            return good

    def view(
        self, unit: str, like: Mapping[str, torch.Tensor], *, before: Callable[[], None]
    ) -> dict[str, FileView] | None:
        """The unit's tensors, of these names, dtypes and shapes, where they lie in the system's page cache; None where
        they are not there whole, or were not loaded and verified since the file was what it is now. `before`: see
        `view_run`."""
        from streaming.file_views import FileView, map_run, view_run

        with self._using() as model:
            with self._changed:
                found = self._units.get(unit)
            if model is None or found is None or not holds_same(found, like):
                return None
            try:
                state = self._look(model)
                if self._verified.get(found) != state:
                    return None
                nbytes = found.stop - found.start
                memory = map_run(model.data, found.start, nbytes)
                if memory is None:
                    return None
                parts = {one.name: memory[one.offset - found.start :][: one.nbytes] for one in found.tensors}
                check = partial(self._check_view, found, tuple(parts[one.name] for one in found.tensors), state)
                whole = FileView(memory, self.file, check)
                if not view_run(whole, model.data, found.start, before=before):
                    return None
                if self._look(model) != state:
                    return None
            except OSError:
                return None
        return {name: FileView(part, self.file, check) for name, part in parts.items()}

    def _check_view(self, unit: CachedUnit, parts: tuple[torch.Tensor, ...], state: DataState) -> None:
        """Raise CheckpointError where the file has changed meanwhile, and the unit with it."""
        with self._using() as model:
            found = state if model is None else data_state(model.data)
            if found == state:
                return
            checksum = 0
            for part in parts if found.nbytes >= unit.stop else ():
                checksum = zlib.crc32(byte_view(part), checksum)
        if found.nbytes < unit.stop or checksum != unit.checksum:
            raise CheckpointError(
                f"{self.file} was changed by somebody while {unit.name} was used where it lies in it "
                "(--safetensors-load-strategy lazy); load the model again"
            )

    def _past_reader(self, model: ModelFolder) -> Read | None:
        """What reads the data file past the page cache; None where that cannot be."""
        from streaming.past_cache import PastFile

        with self._changed:
            if self._past is None:
                self._past = PastFile(model.data)
            past = self._past
        return partial(read_past, past) if past.is_open else None

    def _filled(self, model: ModelFolder, unit: CachedUnit, memory: Mapping[str, memoryview], read: Read) -> bool:
        """Whether the memory holds what was written: it has the checksum, or is of a file that has not changed since
        it had."""
        try:
            before = self._look(model)
            if self._verified.get(unit) == before:
                _fill(read, unit, memory, crc=None)
                after = self._look(model)
                if after == before:
                    return True
                before = after
            if _fill(read, unit, memory, crc=0) != unit.checksum:
                return False
            if before.is_settled and self._look(model) == before:
                self._verified[unit] = before
            return True
        except (OSError, EOFError):
            return False

    def _look(self, model: ModelFolder) -> DataState:
        """The data file's state; a file that somebody has cut short ends writing, and the units beyond are forgotten.

        Raises OSError.
        """
        with self._changed:
            state = data_state(model.data)
            last = self._last_stop
            if state.nbytes >= last:
                return state
            self._units = {name: unit for name, unit in self._units.items() if unit.stop <= state.nbytes}
            self._last_stop = max((unit.stop for unit in self._units.values()), default=0)
            self._kept_end = aligned(self._last_stop)
        self._stop_writing(
            CacheCutError(
                f"was cut short by somebody while it was in use ({format_size(state.nbytes)} of "
                f"{format_size(last)} are left)"
            )
        )
        return state

    def drop_behind(self, unit: str) -> None:
        """Let the system drop the unit's bytes from the page cache; what is not on the disk yet goes once it is."""
        with self._using() as model:
            with self._changed:
                found = self._units.get(unit)
                if found is not None and unit in self._unsynced:
                    self._drop_later[unit] = found
            if model is not None and found is not None:
                _drop(model.data, found)

    # --- writing

    def put(self, unit: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep a unit. One that is there already stays as it is.

        Where the disk is full, the limit reached or the folder lost, nothing more is written from then on, and `warn`
        is told once. Raises ValueError for what no cache can hold: no tensors, or names of more than 1,000 letters.
        """
        with self._using() as model:
            placed = None if model is None else self._begin(unit, tensors)
            if model is None or placed is None:
                return
            try:
                self._look(model)
                if not self._writes:  # one that was cut short is not made long again
                    return
                self._reserve(model, placed)
                checksum = 0
                for one in placed.tensors:
                    plain = tensors[one.name].detach().cpu().contiguous()
                    checksum = write_whole(model.data, byte_view(plain), offset=one.offset, crc=checksum)
                self._commit(model, replace(placed, checksum=checksum))
            except OSError as error:
                self._stop_writing(error)
            finally:
                self._end_writing(model, unit)

    def _begin(self, unit: str, tensors: Mapping[str, torch.Tensor]) -> CachedUnit | None:
        """Where the unit goes, in a part of the file that is its own; None where it is not to be written."""
        with self._changed:
            if not self._writes or unit in self._units or unit in self._writing:
                return None
            placed = place(unit, tensors, start=self._end)
            self._end = aligned(placed.stop)
            self._writing.add(unit)
            return placed

    def _reserve(self, model: ModelFolder, placed: CachedUnit) -> None:
        """Make the file so long, and only then see whether all is under the limit: of two processes that do this at
        the same time at least one sees both."""
        with self._changed:
            os.ftruncate(model.data, max(self._end, os.fstat(model.data).st_size))
        used = make_room(self._path.parent, limit_nbytes=self.limit_nbytes)
        if used > self.limit_nbytes:
            raise CacheFullError(
                f"is full: a unit of {format_size(placed.nbytes)} needs {format_size(used)} in all, the limit is "
                f"{format_size(self.limit_nbytes)} (--cache-size)"
            )

    def _commit(self, model: ModelFolder, unit: CachedUnit) -> None:
        line = journal_line(unit, key_crc=model.key_crc)
        with self._changed:
            if not self._writes:
                return
            if model.journal_nbytes + len(line) > MOST_JOURNAL_NBYTES:
                raise CacheFullError(f"has a journal of {format_size(model.journal_nbytes)}, which is the most")
            _append(model, line)
            self._units[unit.name] = unit
            self._last_stop = max(self._last_stop, unit.stop)
            self._unsynced.add(unit.name)
            self._unsynced_nbytes += unit.nbytes
            self._kept_end = max(self._kept_end, aligned(unit.stop))
            self.written_nbytes += unit.nbytes
            due = self._unsynced_nbytes >= SYNC_NBYTES
        if due:
            self._sync(model)

    def _sync(self, model: ModelFolder) -> None:
        with self._changed:
            synced, self._unsynced, self._unsynced_nbytes = self._unsynced, set(), 0
        os.fdatasync(model.data)
        with self._changed:
            dropped = [self._drop_later.pop(name) for name in synced & self._drop_later.keys()]
        for unit in dropped:
            _drop(model.data, unit)

    def _stop_writing(self, error: OSError) -> None:
        with self._changed:
            told, self._writes = not self._writes, False
        if told:
            return
        if isinstance(error, CacheFullError):
            self._warn(f"the stored cache {self._path.parent} {error}: nothing more is kept")
        elif isinstance(error, CacheCutError):
            self._warn(f"the stored cache {self._path} {error}: nothing more is kept")
        else:
            self._warn(f"the stored cache {self._path} cannot be written ({_words(error)}): nothing more is kept")

    def _end_writing(self, model: ModelFolder, unit: str) -> None:
        """When writing has failed, the last one gives back the room of what was not committed."""
        with self._changed:
            self._writing.discard(unit)
            if not self._writes and not self._writing and self._end > self._kept_end:
                self._end = self._kept_end
                with suppress(OSError):
                    os.ftruncate(model.data, self._end)

    # --- its end

    @contextmanager
    def _using(self) -> Iterator[ModelFolder | None]:
        """The open folder, which stays open for the block; None where there is none."""
        with self._changed:
            model = self._model
            self._users += 1
        try:
            yield model
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Wait for the calls that are going on, sync what was written, close the files."""
        with self._changed:
            model, self._model = self._model, None
            self._changed.wait_for(lambda: not self._users)
            self._units.clear()
        if self._past is not None:
            self._past.close()
        if model is None:
            return
        if self._writes and self._unsynced and not self._only_this_run:
            try:
                self._sync(model)
            except OSError as error:
                self._stop_writing(error)
        self._writes = False
        model.close()
        if self._only_this_run and model.writes:
            remove_model(self._path.parent, self._path.name)


def _fill(read: Read, unit: CachedUnit, memory: Mapping[str, memoryview], *, crc: int | None) -> int | None:
    """Read the unit; the checksum `crc` (None: none is wanted) carried on over it. Raises EOFError, OSError."""
    for one in unit.tensors:
        crc = read(memory[one.name], offset=one.offset, crc=crc)
    return crc


def _append(model: ModelFolder, line: bytes) -> None:
    """Write a line whole, or leave the journal as it was and raise OSError."""
    try:
        if os.write(model.journal, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with suppress(OSError):
            os.ftruncate(model.journal, model.journal_nbytes)
        raise
    model.journal_nbytes += len(line)


def _drop(descriptor: int, unit: CachedUnit) -> None:
    drop(descriptor, unit.start, unit.stop - unit.start)


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)

"""Files written into a new folder so that nothing half-written is ever taken for whole.

Every file has a temporary name until it is synced to the disk and `publish` renames all that wait. What makes the
folder whole (a manifest, an index) is written and published last; whatever ends the work before leaves nothing of it.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from streaming.errors import OptionError, StreamingError
from streaming.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "tekken.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_WRITE_NBYTES = 16 << 20  # one write call: short enough to end soon when it is interrupted
_PARTIAL = ".partial"


@dataclass
class NewFolder:
    """The files of one run in `out`. Use `new_folder`, which leaves nothing behind when it does not come to its end."""

    out: Path
    _made: list[Path] = field(default_factory=list)  # files of this run, so far
    _waiting: list[Path] = field(default_factory=list)  # those that still have their temporary name

    @contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        """A new file to write into, synced at the end of the block. Raises OSError when the disk is full or fails."""
        with _partial(self.out / name).open("xb", buffering=0) as file:  # first: what another one writes is not ours
            self._made.append(self.out / name)
            self._waiting.append(self.out / name)
            yield _Whole(file)  # type: ignore[misc]
            os.fsync(file.fileno())

    def publish(self) -> None:
        """Give every file that waits its name."""
        for path in self._waiting:
            _partial(path).rename(path)
        self._waiting.clear()
        _sync_folder(self.out)

    def keep(self) -> None:
        """The folder is whole: from now on nothing of it is removed."""
        self._made.clear()

    def remove(self) -> None:
        """Take away whatever this run has written."""
        for path in reversed(self._made):  # what makes it whole first
            for name in (path, _partial(path)):
                with suppress(OSError):
                    name.unlink()


class _Whole:
    """A file whose `write` writes all: a full disk may take a part and fail at the next call."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> None:
        view, done = memoryview(data).cast("B"), 0
        while done < len(view):
            done += self._file.write(view[done : done + _WRITE_NBYTES])

    def tell(self) -> int:
        return int(self._file.tell())


@contextmanager
def new_folder(out: Path, *, option: str) -> Iterator[NewFolder]:
    """A new or empty folder to write into. Whatever ends the block early, its files are removed, and the folder with
    them if it was made here. A failing disk is one line that begins with `option`: StreamingError."""
    made = not out.exists()
    folder = NewFolder(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        yield folder
    except BaseException as error:
        folder.remove()
        if made:
            with suppress(OSError):
                out.rmdir()
        if isinstance(error, OSError):
            raise StreamingError(f"{option} {out}: {error.strerror or error}; nothing was kept of it") from error
        raise


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}{_PARTIAL}")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- before and beside it


def names_in(out: Path, *, option: str) -> list[str]:
    """What the folder holds; nothing where it is not there. Raises OptionError where it is no folder."""
    if not out.exists():
        return []
    if not out.is_dir():
        raise OptionError(f"{option} {out}: is not a folder")
    return sorted(os.listdir(out))


def check_room(out: Path, needed: int, *, option: str) -> None:
    """Refuse, before anything is read, a disk without room for so many bytes: StreamingError with both numbers."""
    folder = next(parent for parent in (out.absolute(), *out.absolute().parents) if parent.is_dir())
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise StreamingError(f"{option} {out}: {format_size(needed)} are needed, {format_size(free)} are free there")


def copied_files(root: Path) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of a model's tokenizer, template and generation files; `root`: its folder, or a file in it."""
    folder = root if root.is_dir() else root.parent
    for name in COPIED:
        if (folder / name).is_file():
            yield name, (folder / name).read_bytes()


def bytes_of(tensor: torch.Tensor) -> Iterator[Any]:
    """The tensor's bytes on the host, part by part; those of a device are brought over."""
    whole = tensor.detach().contiguous().view(-1)
    step = max(1, _WRITE_NBYTES // whole.element_size())
    for part in whole.split(step) if whole.numel() else ():
        host = part.cpu()
        yield (ctypes.c_char * (host.numel() * host.element_size())).from_address(host.data_ptr())
        del host  # kept until its bytes were written

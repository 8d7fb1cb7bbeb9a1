"""How a checkpoint's files are read: what was asked, or what suits where they lie, with the reason. Pure. [no-torch]

Where each read waits for a server (a network file system), many must be under way at once: `prefetch`, as long as what
is pulled into the page cache fits there. From a local disk two threads reading in plan order reached the speed of the
bare read, cold and warm, in development's measurements, so that is `direct`. Weights that come anew in every pass are
another matter: copied out of the page cache they take a core as long as the products take two, so those of local files
are used where they lie (4B parameters in bfloat16, 2 GiB of them kept: 0.40 s a token for 0.97).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streaming.errors import OptionError
from streaming.sizes import format_size

STRATEGIES = ("lazy", "eager", "prefetch", "direct", "torchao")
BACK_ENDS = ("runai_streamer", "fastsafetensors", "instanttensor")  # load formats whose package gets the bytes
BATCH_NBYTES = 64 << 20  # of pieces that a back end is asked for at once
BUFFERS_NBYTES = 64 << 20  # of fastsafetensors' own threads
READ_THREADS = 2  # enough to keep a local disk's queue filled; more take time from the one who computes
NETWORK = frozenset({
    "nfs", "nfs4", "lustre", "cifs", "smb3", "smbfs", "ceph", "gpfs", "beegfs", "afs", "9p", "virtiofs",
    "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.goofys", "fuse.juicefs", "fuse.glusterfs", "fuse.rclone",
    "fuse.blobfuse", "fuse.blobfuse2", "fuse.mount-s3", "fuse.ceph",
})  # fmt: skip
CACHE_SHARE = 0.9  # of the available memory, that a checkpoint may take in the page cache
REREADS = 3  # as many bytes as this times the files' size `eager` may read before it is refused


@dataclass(frozen=True)
class ReadChoice:
    """A strategy, or the back end that stands for one, and why it was taken. `maps_streamed`: weights that come anew in
    every pass are used where they lie in the page cache."""

    strategy: str
    reason: str
    maps_streamed: bool = False


@dataclass(frozen=True)
class ReadMethod:
    """What a reader's program is told: the strategy and its numbers."""

    strategy: str = "direct"
    threads: int = READ_THREADS
    ahead_threads: int = 8  # prefetch
    block_nbytes: int = 16 << 20  # prefetch
    ahead_nbytes: int = 1 << 30  # prefetch: how far the page cache is filled ahead of the reader


@dataclass(frozen=True)
class Surroundings:
    """What the choice depends on: where the files lie, how large they are, what memory there is (None: unknown)."""

    file_system: str | None
    nbytes: int
    available_nbytes: int | None
    torchao: bool = False


def choose_strategy(asked: str | None, found: Surroundings) -> ReadChoice:
    """The strategy for these surroundings, unless one was asked for."""
    if asked is not None:
        return ReadChoice(asked, f"--safetensors-load-strategy {asked}", maps_streamed=asked == "lazy")
    if found.torchao:
        return ReadChoice("torchao", "the checkpoint is serialized by torchao")
    where = found.file_system or "an unknown file system"
    if found.file_system not in NETWORK:
        return ReadChoice("direct", f"local files ({where})", maps_streamed=True)
    size = format_size(found.nbytes)
    if found.available_nbytes is None:
        return ReadChoice("direct", f"files on a network file system ({where}), but the available memory is unknown")
    room = f"90 % of {format_size(found.available_nbytes)} of available memory"
    if found.nbytes <= CACHE_SHARE * found.available_nbytes:
        return ReadChoice("prefetch", f"files on a network file system ({where}), {size} fit into {room}")
    return ReadChoice("direct", f"files on a network file system ({where}), but {size} are more than {room}")


def whole_file_bytes(pieces: Sequence[tuple[int, bool]], sizes: Sequence[int]) -> tuple[int, int]:
    """What `eager` reads in all and holds at once, given (file, whether its place is free) of the pieces.

    Raises OptionError where the weights lie so scattered that files would be read again and again.
    """
    from streaming.whole_files import file_visits

    visits = file_visits(pieces)
    total, once = sum(sizes[file] for file in visits), sum(sizes[file] for file in set(visits))
    if total > REREADS * once:
        raise OptionError(
            f"--safetensors-load-strategy eager: the weights lie scattered over the files, so {format_size(total)} "
            f"would be read of files of {format_size(once)}; choose another strategy, or no --quantization"
        )
    return total, max((sizes[file] for file in visits), default=0)

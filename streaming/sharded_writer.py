"""Writing a folder of shards: each layer's stored tensors as soon as the layer is there, the manifest last.

The header of the file is known before anything is loaded (the plan says what is stored), so tensors go to the disk in
reading order and nothing is collected. Every file is written under a temporary name, synced and renamed; the manifest
comes last, and without it the folder is refused: whatever ends the work, what is left is never taken for whole.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from layers.architecture import is_tied
from streaming.checkpoint.members import CONFIG
from streaming.checkpoint.remote_file import RemoteFile
from streaming.errors import OptionError, StreamingError
from streaming.prepare import Prepared
from streaming.read_plan import ALIGNMENT
from streaming.sharded import (
    GGUF_METADATA,
    MANIFEST,
    Manifest,
    ShardFile,
    Topology,
    part_name,
    read_manifest,
    same_source,
)
from streaming.sharded_plan import stored_names
from streaming.sizes import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from streaming.runner import ModelRunner

COPIED = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "tekken.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_WRITE_NBYTES = 16 << 20  # one write call: short enough to end soon when it is interrupted
_PARTIAL = ".partial"


def wanted_manifest(prepared: Prepared) -> Manifest:
    """The manifest of what this load would save, its files not yet known."""
    options, here = prepared.options, Topology()
    return Manifest(
        tensor_parallel_size=here.tensor_parallel_size,
        expert_parallel_size=here.expert_parallel_size,
        quantization=options.quantization,
        quantize_head=options.quantize_head,
        dtype=prepared.dtype.torch_name,
        tied=is_tied(prepared.specs),
        source=source_digest(prepared),
        files=(),
    )


def source_digest(prepared: Prepared) -> str:
    """A digest of what is loaded: the configuration, each tensor's place, each file's size and time, a remote one's
    version."""
    checkpoint, found = prepared.checkpoint, hashlib.sha256()
    found.update(json.dumps(dict(checkpoint.config), sort_keys=True, default=str).encode())
    for name, info in sorted(checkpoint.tensors.items()):
        found.update(f"{name} {info.dtype.value} {info.shape} {info.offset}\n".encode())
    for file in sorted(path for path in checkpoint.files if isinstance(path, Path)):
        status = file.stat()
        found.update(f"{file.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    for remote in sorted((file for file in checkpoint.files if isinstance(file, RemoteFile)), key=str):
        found.update(f"{remote.url} {remote.nbytes} {remote.etag} {remote.modified}\n".encode())
    return found.hexdigest()


def holds_same(out: Path, wanted: Manifest) -> bool:
    """Whether the folder holds the very same already, whole; False for one that is empty or not there.

    Raises OptionError, before anything is read, for one that holds anything else.
    """
    names = _names_in(out)
    if not names:
        return False
    if MANIFEST in names:
        found = read_manifest(out)
        sizes = {file.name: file.nbytes for file in found.files}
        if same_source(found, wanted) and all(_size(out / name) == size for name, size in sizes.items()):
            return True
    raise OptionError(f"--out {out}: is not empty ({len(names)} files, such as {names[0]}) and does not hold the same")


def _names_in(out: Path) -> list[str]:
    if not out.exists():
        return []
    if not out.is_dir():
        raise OptionError(f"--out {out}: is not a folder")
    return sorted(os.listdir(out))


def check_room(out: Path, needed: int) -> None:
    """Refuse, before anything is read, a disk without room for so many bytes: StreamingError with both numbers."""
    folder = next(parent for parent in (out.absolute(), *out.absolute().parents) if parent.is_dir())
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise StreamingError(f"--out {out}: {format_size(needed)} are needed, {format_size(free)} are free there")


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


@dataclass
class ShardWriter:
    """Writes one folder. Use `writing`, which leaves nothing behind when it does not come to its end."""

    prepared: Prepared
    out: Path
    manifest: Manifest
    _made: list[Path] = field(default_factory=list)  # files of this run, so far
    _waiting: list[Path] = field(default_factory=list)  # those that still have their temporary name

    def write(self, runner: ModelRunner, *, stop: Callable[[], None]) -> Manifest:
        """Every layer as it becomes ready, then the small files, then the manifest, which is given back.

        To be run in the forward thread; `stop` raises to cancel. Raises OSError when the disk is full or fails.
        """
        name = part_name(Topology().rank)
        with self._file(name) as file:
            digest = hashlib.sha256()
            _put(file, digest, safetensors_header(self.prepared))
            for layer in self.prepared.plan.layers:
                if not layer.spec.params:
                    continue
                with runner.residency.lease(layer.name, stop=stop) as moment:
                    runner.device.order_after(moment)
                    for tensor in _tensors_of(runner, layer.spec.params):
                        for part in _bytes_of(tensor):
                            stop()
                            _put(file, digest, part)
            shard = ShardFile(name, file.tell(), digest.hexdigest())
        for name, data in self._small_files():
            with self._file(name) as file:
                file.write(data)
        manifest = replace(self.manifest, files=(shard,))
        self._rename_all()
        with self._file(MANIFEST) as file:
            file.write(json.dumps(manifest.as_dict(), indent=1).encode() + b"\n")
        self._rename_all()
        self._made.clear()
        return manifest

    def _small_files(self) -> Iterable[tuple[str, bytes]]:
        checkpoint = self.prepared.checkpoint
        yield CONFIG, json.dumps(dict(checkpoint.config), indent=1).encode()
        if checkpoint.metadata:
            yield GGUF_METADATA, json.dumps(dict(checkpoint.metadata)).encode()
            return
        folder = checkpoint.root if checkpoint.root.is_dir() else checkpoint.root.parent
        for name in COPIED:
            if (folder / name).is_file():
                yield name, (folder / name).read_bytes()

    @contextmanager
    def _file(self, name: str) -> Iterator[BinaryIO]:
        with _partial(self.out / name).open("xb", buffering=0) as file:  # first: what another one writes is not ours
            self._made.append(self.out / name)
            self._waiting.append(self.out / name)
            yield _Whole(file)  # type: ignore[misc]
            os.fsync(file.fileno())

    def _rename_all(self) -> None:
        for path in self._waiting:
            _partial(path).rename(path)
        self._waiting.clear()
        _sync_folder(self.out)

    def remove(self) -> None:
        """Take away whatever this run has written."""
        for path in reversed(self._made):  # the manifest first
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
def writing(prepared: Prepared, out: Path, manifest: Manifest) -> Iterator[ShardWriter]:
    """A writer into a new or empty folder. Whatever ends the block early, its files are removed, and the folder with
    them if it was made here. A failing disk is one line: StreamingError."""
    made = not out.exists()
    writer = ShardWriter(prepared, out, manifest)
    try:
        out.mkdir(parents=True, exist_ok=True)
        yield writer
    except BaseException as error:
        writer.remove()
        if made:
            with suppress(OSError):
                out.rmdir()
        if isinstance(error, OSError):
            raise StreamingError(f"--out {out}: {error.strerror or error}; nothing was kept of it") from error
        raise


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}{_PARTIAL}")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- bytes


def safetensors_header(prepared: Prepared) -> bytes:
    """Length and JSON of the file (https://github.com/huggingface/safetensors#format), padded so that data begin at a
    multiple of 64 bytes; tensors in reading order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for layer in prepared.plan.layers:
        for param in layer.spec.params:
            for name, spec in stored_names(param).items():
                offsets = [offset, offset + spec.nbytes]
                entries[name] = {"dtype": spec.dtype.value, "shape": list(spec.shape), "data_offsets": offsets}
                offset = offsets[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _tensors_of(runner: ModelRunner, params: Iterable[Any]) -> Iterator[torch.Tensor]:
    for param in params:
        stored: Mapping[str, torch.Tensor] = runner.device.stored[param.name]
        for name in stored_names(param):
            yield stored[name.rpartition(".")[2]]


def _bytes_of(tensor: torch.Tensor) -> Iterator[Any]:
    """The tensor's bytes on the host, part by part; those of a device are brought over."""
    whole = tensor.detach().contiguous().view(-1)
    step = max(1, _WRITE_NBYTES // whole.element_size())
    for part in whole.split(step) if whole.numel() else ():
        host = part.cpu()
        yield (ctypes.c_char * (host.numel() * host.element_size())).from_address(host.data_ptr())
        del host  # kept until its bytes were written


def _put(file: Any, digest: Any, data: Any) -> None:
    digest.update(data)
    file.write(data)

"""Writing a folder of shards: each layer's stored tensors as soon as the layer is there, the manifest last.

The header of the file is known before anything is loaded (the plan says what is stored), so tensors go to the disk in
reading order and nothing is collected. Every file is written under a temporary name, synced and renamed; the manifest
comes last, and without it the folder is refused: whatever ends the work, what is left is never taken for whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layers.architecture import HEAD_WEIGHT, is_tied
from quant.registry import scheme_by_name
from streaming.checkpoint.members import CONFIG
from streaming.checkpoint.remote_file import RemoteFile
from streaming.errors import OptionError
from streaming.kv_scales import scales_to_save
from streaming.new_folder import NewFolder, bytes_of, copied_files, names_in, new_folder
from streaming.prepare import Prepared
from streaming.read_plan import ALIGNMENT
from streaming.saved_forms import forms_of
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

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from streaming.runner import ModelRunner


def wanted_manifest(prepared: Prepared) -> Manifest:
    """The manifest of what this load would save, its files not yet known."""
    options, here = prepared.options, Topology()
    weights = forms_of(prepared.specs)
    return Manifest(
        tensor_parallel_size=here.tensor_parallel_size,
        expert_parallel_size=here.expert_parallel_size,
        quantization=scheme_by_name(options.quantization).name,
        quantize_head=HEAD_WEIGHT in weights,
        dtype=prepared.dtype.torch_name,
        tied=is_tied(prepared.specs),
        source=source_digest(prepared),
        files=(),
        weights=weights,
        kv_scales=scales_to_save(prepared.plan, prepared.checkpoint, num_layers=prepared.config.num_layers),
    )


def source_digest(prepared: Prepared) -> str:
    """A digest of what is loaded: the configuration, each tensor's place, each file's size and time, a remote one's
    version; and of the percentile of its scales."""
    checkpoint, found = prepared.checkpoint, hashlib.sha256()
    found.update(json.dumps(dict(checkpoint.config), sort_keys=True, default=str).encode())
    if prepared.options.scale_percentile is not None:
        found.update(f"percentile {prepared.options.scale_percentile!r}\n".encode())
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
    names = names_in(out, option="--out")
    if not names:
        return False
    if MANIFEST in names:
        found = read_manifest(out)
        sizes = {file.name: file.nbytes for file in found.files}
        if same_source(found, wanted) and all(_size(out / name) == size for name, size in sizes.items()):
            return True
    raise OptionError(f"--out {out}: is not empty ({len(names)} files, such as {names[0]}) and does not hold the same")


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


@dataclass
class ShardWriter:
    """Writes one folder. Use `writing`, which leaves nothing behind when it does not come to its end."""

    prepared: Prepared
    folder: NewFolder
    manifest: Manifest

    def write(self, runner: ModelRunner, *, stop: Callable[[], None]) -> Manifest:
        """Every layer as it becomes ready, then the small files, then the manifest, which is given back.

        To be run in the forward thread; `stop` raises to cancel. Raises OSError when the disk is full or fails.
        """
        name = part_name(Topology().rank)
        with self.folder.file(name) as file:
            digest = hashlib.sha256()
            _put(file, digest, safetensors_header(self.prepared))
            for layer in self.prepared.plan.layers:
                if not layer.spec.params:
                    continue
                with runner.residency.lease(layer.name, stop=stop) as moment:
                    runner.device.order_after(moment)
                    for tensor in _tensors_of(runner, layer.spec.params):
                        for part in bytes_of(tensor):
                            stop()
                            _put(file, digest, part)
            shard = ShardFile(name, file.tell(), digest.hexdigest())
        for name, data in self._small_files():
            with self.folder.file(name) as file:
                file.write(data)
        manifest = replace(self.manifest, files=(shard,))
        self.folder.publish()
        with self.folder.file(MANIFEST) as file:
            file.write(json.dumps(manifest.as_dict(), indent=1).encode() + b"\n")
        self.folder.publish()
        self.folder.keep()
        return manifest

    def _small_files(self) -> Iterable[tuple[str, bytes]]:
        checkpoint = self.prepared.checkpoint
        yield CONFIG, json.dumps(dict(checkpoint.config), indent=1).encode()
        if checkpoint.metadata:
            yield GGUF_METADATA, json.dumps(dict(checkpoint.metadata)).encode()
            return
        yield from copied_files(checkpoint.root)


@contextmanager
def writing(prepared: Prepared, out: Path, manifest: Manifest) -> Iterator[ShardWriter]:
    """A writer into a new or empty folder. Whatever ends the block early, its files are removed, and the folder with
    them if it was made here. A failing disk is one line: StreamingError."""
    with new_folder(out, option="--out") as folder:
        yield ShardWriter(prepared, folder, manifest)


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


def _put(file: Any, digest: Any, data: Any) -> None:
    digest.update(data)
    file.write(data)

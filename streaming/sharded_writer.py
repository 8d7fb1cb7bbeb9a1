"""Writing a folder of shards: a file for each rank, layer by layer, the manifest last.

Ranks that are cut apart by tensor parallelism are loaded together, since they agree on scales; the others one after the
other, all in this process. Of each of those loaded together one layer is held, whatever the size of the model. The
header of a file is known before anything is loaded (the plan says what is stored), so tensors go to the disk in reading
order. Every file is written under a temporary name, synced and renamed; the manifest comes last, and without it the
folder is refused: whatever ends the work, what is left is never taken for whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from layers.architecture import HEAD_WEIGHT, is_tied
from quant.registry import scheme_by_name
from streaming.budget import make_budget
from streaming.checkpoint.members import CONFIG
from streaming.checkpoint.remote_file import RemoteFile
from streaming.errors import BudgetError, OptionError
from streaming.hooks import Hooks
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
    mesh_of,
    part_name,
    read_manifest,
    same_source,
)
from streaming.sharded_plan import stored_names
from streaming.sizes import format_size

if TYPE_CHECKING:
    import torch

Ranks = Sequence[Prepared]
"""The load of every rank, in their order."""


def wanted_manifest(ranks: Ranks) -> Manifest:
    """The manifest of what these loads would save, their files not yet known."""
    first = ranks[0]
    options, mesh = first.options, mesh_of(first.topology)
    weights = forms_of(spec for stage in ranks[:: mesh.stage_ranks] for spec in stage.specs)
    return Manifest(
        tensor_parallel_size=mesh.tensor,
        expert_parallel_size=mesh.expert,
        pipeline_parallel_size=mesh.pipeline,
        expert_placement=mesh.placement,
        expert_map=mesh.expert_map,
        quantization=scheme_by_name(options.quantization).name,
        quantize_head=HEAD_WEIGHT in weights,
        dtype=first.dtype.torch_name,
        tied=is_tied(ranks[-1].specs),
        source=source_digest(first),
        files=(),
        weights=weights,
        kv_scales=scales_to_save(first.plan, first.checkpoint, num_layers=first.config.num_layers),
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


def check_memory(ranks: Ranks, *, limit_nbytes: int | None) -> int:
    """The most that is held at once, of the layers loaded together that take most. Raises BudgetError with both numbers
    when the limit is too small for it."""
    needed = max(_held_nbytes(group) for group in groups_of(ranks))
    if limit_nbytes is not None and needed > limit_nbytes:
        raise BudgetError(
            f"--memory {format_size(limit_nbytes)} is too small: {format_size(needed)} are needed for a layer of each "
            "rank that scales are agreed with; try a smaller --window"
        )
    return needed


def _held_nbytes(group: Ranks) -> int:
    from streaming.one_layer import only_layer

    found = dict.fromkeys(layers_of(group), 0)
    for prepared in group:
        window = prepared.options.window_nbytes or prepared.budget.window_nbytes
        for layer in (layer.name for layer in prepared.plan.layers if layer.items):
            plan, held = only_layer(prepared, layer).plan, prepared.budget.file_nbytes
            found[layer] += make_budget(plan, window_nbytes=window, cache_nbytes=0, file_nbytes=held).peak_nbytes
    return max(found.values())


def groups_of(ranks: Ranks) -> Iterator[Ranks]:
    """The ranks that are loaded together: those that share each layer."""
    size = ranks[0].topology.tensor
    return (ranks[first : first + size] for first in range(0, len(ranks), size))


def layers_of(ranks: Ranks) -> list[str]:
    """The layers of any of the ranks, in the order in which files hold them."""
    return list(dict.fromkeys(layer.name for prepared in ranks for layer in prepared.plan.layers))


@dataclass
class ShardWriter:
    """Writes one folder. Use `writing`, which leaves nothing behind when it does not come to its end."""

    ranks: Ranks
    folder: NewFolder
    manifest: Manifest
    hooks: Hooks = field(default_factory=Hooks)

    def write(self) -> Manifest:
        """Every layer of every rank, then the small files, then the manifest, which is given back.

        Raises LayerLoadError, and OSError when the disk is full or fails.
        """
        files = tuple(file for group in groups_of(self.ranks) for file in self._write_group(group))
        for name, data in self._small_files():
            with self.folder.file(name) as file:
                file.write(data)
        manifest = replace(self.manifest, files=files)
        self.folder.publish()
        with self.folder.file(MANIFEST) as file:
            file.write(json.dumps(manifest.as_dict(), indent=1).encode() + b"\n")
        self.folder.publish()
        self.folder.keep()
        return manifest

    def _write_group(self, group: Ranks) -> list[ShardFile]:
        from streaming.layer_parts import load_parts

        with ExitStack() as stack:
            parts = [
                _PartFile(name, stack.enter_context(self.folder.file(name)))
                for name in (part_name(prepared.topology.rank) for prepared in group)
            ]
            for part, prepared in zip(parts, group, strict=True):
                part.put(safetensors_header(prepared))
            for layer in layers_of(group):
                loaded = load_parts(group, layer, hooks=self.hooks)
                for part, prepared, tensors in zip(parts, group, loaded, strict=True):
                    for tensor in _in_order(prepared, layer, tensors):
                        for data in bytes_of(tensor):
                            part.put(data)
            return [part.entry() for part in parts]

    def _small_files(self) -> Iterable[tuple[str, bytes]]:
        checkpoint = self.ranks[0].checkpoint
        yield CONFIG, json.dumps(dict(checkpoint.config), indent=1).encode()
        if checkpoint.metadata:
            yield GGUF_METADATA, json.dumps(dict(checkpoint.metadata)).encode()
            return
        yield from copied_files(checkpoint.root)


@contextmanager
def writing(ranks: Ranks, out: Path, manifest: Manifest, *, hooks: Hooks) -> Iterator[ShardWriter]:
    """A writer into a new or empty folder. Whatever ends the block early, its files are removed, and the folder with
    them if it was made here. A failing disk is one line: StreamingError."""
    with new_folder(out, option="--out") as folder:
        yield ShardWriter(ranks, folder, manifest, hooks)


@dataclass
class _PartFile:
    """A rank's file, with the digest of what has been written."""

    name: str
    file: BinaryIO
    digest: Any = field(default_factory=hashlib.sha256)

    def put(self, data: Any) -> None:
        self.digest.update(data)
        self.file.write(data)

    def entry(self) -> ShardFile:
        return ShardFile(self.name, self.file.tell(), self.digest.hexdigest())


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


def _in_order(prepared: Prepared, layer: str, tensors: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The layer's tensors in the order of the header; of a layer of which the rank has no rows there are none."""
    specs = (one.spec for one in prepared.plan.layers if one.name == layer)
    names = (name for spec in specs for param in spec.params for name in stored_names(param))
    return (tensors[name] for name in names if tensors)

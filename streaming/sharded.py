"""Folders that save-shards wrote (load format `sharded_state`): the manifest, and what it must agree with. [no-torch]

    firstlayer_shards.json                      what follows, written last: without it the folder is not whole
    model-rank-00000-part-00000.safetensors     the stored tensors of one rank, under the names of the parameters
    config.json, tokenizer and generation files the model's own

A rank reads its own file only. The manifest says how each whole weight is kept (its scheme, and what the checkpoint
itself had joined), whether that was quantized while loading or came quantized; and the scales that the checkpoint held
for an fp8 KV cache. What a rank has of a weight follows from that and the mesh. The stored form depends on the schemes,
the dtype and the mesh (how the ranks share the model, and which experts are where), so a run that asks for others is
refused: nothing is quantized twice. It is the form before a device's post-processing, whatever device it was saved
with, so nothing is processed twice either.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from layers.errors import ShardError
from layers.topology import Topology
from layers.weights import LayerSpec
from quant.dtypes import DType
from quant.errors import QuantError
from quant.registry import scheme_by_name
from streaming.checkpoint.files import read_json_object, states_before
from streaming.checkpoint.members import (
    CONFIG,
    SHARDED,
    Listing,
    hub_root_of,
    list_folder,
    member_fault,
    read_member_object,
)
from streaming.checkpoint.report import Report
from streaming.checkpoint.safetensors import read_safetensors_header
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.errors import CheckpointError, CheckpointFormatError, OptionError
from streaming.kv_scales import KVScales, is_scale
from streaming.options import DTYPES, MOST_RANKS, LoadOptions
from streaming.saved_forms import SavedForms, SavedPolicy, as_saved, parse_forms

FORMAT = "sharded_state"
MANIFEST = SHARDED[0]
GGUF_METADATA = "gguf_metadata.json"  # the tokenizer and chat template of a model that was one GGUF file
VERSION = 3  # 2 said nothing of stages and of where experts are, and was written for one rank only
_PART = re.compile(r"model-rank-(?P<rank>\d{5})-part-\d{5}\.safetensors")


@dataclass(frozen=True)
class ShardFile:
    """One file of a manifest; `sha256` of all its bytes, in hexadecimal."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What firstlayer_shards.json says. `quantization` was asked for when it was saved; `weights` says what is so, for
    each whole weight that is not wide. `tied`: embedding and head are one matrix. `source`: a digest of what it was
    made from, to know the same again. `kv_scales`: of keys and of values, for each layer, or what is wrong with them.
    """

    tensor_parallel_size: int
    expert_parallel_size: int
    pipeline_parallel_size: int
    expert_placement: str
    expert_map: tuple[tuple[int, ...], ...] | None
    quantization: str
    quantize_head: bool
    dtype: str
    tied: bool
    source: str
    files: tuple[ShardFile, ...]
    weights: SavedForms
    kv_scales: KVScales | str | None = None

    @property
    def topology(self) -> Topology:
        """The mesh, seen from rank 0."""
        return Topology(
            tensor=self.tensor_parallel_size, expert=self.expert_parallel_size, pipeline=self.pipeline_parallel_size,
            placement=self.expert_placement, expert_map=self.expert_map,
        )  # fmt: skip

    @property
    def schemes(self) -> str:
        """The schemes of its weights, in words; "none" where all are wide."""
        return _words(self.weights)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        plain = asdict(replace(self, weights={}))
        weights = {name: form.as_dict() for name, form in self.weights.items()}
        return {"format": "firstlayer shards", "version": VERSION, **plain, "weights": weights}


def part_name(rank: int, *, part: int = 0) -> str:
    """The name of a rank's file."""
    return f"model-rank-{rank:05d}-part-{part:05d}.safetensors"


def is_sharded(listing: Listing) -> bool:
    """Whether the folder is one that save-shards wrote. Raises CheckpointError where it did not come to its end."""
    if MANIFEST in listing:
        return True
    if parts := listing.matching(SHARDED[1]):
        raise CheckpointError(
            f"{listing.root}: holds {parts[0]} and no {MANIFEST}: save-shards did not come to its end here; "
            "remove the folder and save again"
        )
    return False


# --- reading


def open_sharded(root: Path) -> Checkpoint:
    """What all ranks have in common of the checkpoint in such a folder; `rank_checkpoint` adds a rank's tensors. Raises
    CheckpointError."""
    if not root.is_dir():
        raise CheckpointError(f"{root}: is not a folder that save-shards wrote")
    if not is_sharded(list_folder(root)):
        raise CheckpointError(f"{root}: no {MANIFEST}; such folders are written by firstlayer save-shards")
    manifest = read_manifest(root)
    report = Report(root)
    config = read_member_object(root / CONFIG, report)
    metadata = read_member_object(root / GGUF_METADATA, report) if (root / GGUF_METADATA).exists() else {}
    report.raise_if_any()
    return Checkpoint(root, FORMAT, {}, (), config, metadata, saved=manifest.as_dict())


def rank_checkpoint(checkpoint: Checkpoint, topology: Topology) -> Checkpoint:
    """The checkpoint with the tensors of one rank, whose files alone are opened. Raises CheckpointError with all
    problems of those, and for a mesh that is not this run's, with both."""
    root, report = checkpoint.root, Report(checkpoint.root)
    manifest = read_manifest(root)
    _check_topology(root, manifest, topology)
    files = [file for file in manifest.files if _rank(file.name) == topology.rank]
    paths = tuple(root / file.name for file in files)
    states = states_before(paths)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in _read_part(root, file, report).items():
            if name in tensors:
                report.add(f"tensor {name!r} is in {tensors[name].file} and in {info.file}", broken=True)
            tensors[name] = info
    report.raise_if_any()
    return replace(checkpoint, tensors=tensors, files=paths, states=states, saved=manifest.as_dict())


def mesh_of(topology: Topology) -> Topology:
    """What a folder holds of a topology: no rank, and of experts nothing where they are cut like dense layers."""
    if topology.expert == 1:
        topology = replace(topology, placement="linear", expert_map=None)
    return topology.at(0)


def _check_topology(root: Path, manifest: Manifest, here: Topology) -> None:
    saved, mesh = manifest.topology, mesh_of(here)
    if saved == mesh:
        return
    experts = str(saved) == str(mesh)  # the sizes are the same: it is where experts are
    raise CheckpointError(
        f"{root}: was saved for {_mesh_words(saved, experts=experts)}; this run has "
        f"{_mesh_words(mesh, experts=experts)}: save it again for these"
    )


def _mesh_words(mesh: Topology, *, experts: bool) -> str:
    if not experts:
        return str(mesh)
    return f"expert placement {mesh.placement}" if mesh.expert_map is None else f"expert map {mesh.expert_map!r:.200}"


def _read_part(root: Path, file: ShardFile, report: Report) -> Mapping[str, TensorInfo]:
    path = root / file.name
    try:
        if fault := member_fault(path, hub_root_of(root)):
            raise CheckpointError(f"{path}: {fault} ({MANIFEST} names it)")
        if (found := path.stat().st_size) != file.nbytes:
            raise CheckpointFormatError(f"{path}: has {found} bytes, but {MANIFEST} says {file.nbytes}")
        return read_safetensors_header(path)
    except CheckpointError as error:
        report.absorb(error)
        return {}


def read_manifest(root: Path) -> Manifest:
    """The manifest of a folder. Raises CheckpointFormatError that names what is wrong in it."""
    path = root / MANIFEST
    found = read_json_object(path, strict=True)
    if found.get("version") not in (2, VERSION):
        raise CheckpointFormatError(
            f"{path}: is of version {found.get('version')!r:.60}; this program reads 2 and {VERSION}: save it again"
        )
    if found["version"] == 2:
        found = {**found, "pipeline_parallel_size": 1, "expert_placement": "linear", "expert_map": None}
    fields = {name: found.get(name) for name in Manifest.__dataclass_fields__}
    for name, kind in _KINDS.items():
        if type(fields[name]) is not kind:
            raise CheckpointFormatError(f"{path}: {name} is {fields[name]!r:.60}, not of type {kind.__name__}")
    try:
        scheme_by_name(found["quantization"])
    except QuantError:
        raise CheckpointFormatError(f"{path}: quantization {found['quantization']!r:.60} is not known") from None
    try:
        fields["weights"] = parse_forms(found["weights"])
    except QuantError as error:
        raise CheckpointFormatError(f"{path}: {error}") from None
    fields["kv_scales"] = _kv_scales(path, found.get("kv_scales"))
    fields["expert_map"] = _expert_map(path, found.get("expert_map"))
    if found["dtype"] not in {dtype.torch_name for dtype in DType if dtype.is_wide}:
        raise CheckpointFormatError(f"{path}: dtype {found['dtype']!r} is none that weights are kept in")
    fields["files"] = tuple(_shard_file(path, entry) for entry in found["files"])
    manifest = Manifest(**fields)  # type: ignore[arg-type]
    _check_ranks(path, manifest)
    return manifest


_SIZES = ("tensor_parallel_size", "expert_parallel_size", "pipeline_parallel_size")
_KINDS = {
    **dict.fromkeys(_SIZES, int), "expert_placement": str, "quantization": str, "quantize_head": bool,
    "dtype": str, "tied": bool, "source": str, "files": list, "weights": dict,
}  # fmt: skip


def _check_ranks(path: Path, manifest: Manifest) -> None:
    """Sizes that make a mesh, and a file for each of its ranks."""
    for name in _SIZES:
        if getattr(manifest, name) > MOST_RANKS:
            raise CheckpointFormatError(f"{path}: {name} is {getattr(manifest, name)}, more than {MOST_RANKS}")
    try:
        world = manifest.topology.world
    except ShardError as error:
        raise CheckpointFormatError(f"{path}: {error}") from None
    ranks = {_rank(file.name) for file in manifest.files}
    if max(ranks, default=0) >= world:
        raise CheckpointFormatError(f"{path}: files names one of rank {max(ranks)}, but there are {world} ranks")
    if len(ranks) < world:
        missing = next(rank for rank in range(world) if rank not in ranks)
        raise CheckpointFormatError(f"{path}: files names none of rank {missing}, of {world} ranks")


def _expert_map(path: Path, found: object) -> tuple[tuple[int, ...], ...] | None:
    if found is None:
        return None
    if isinstance(found, list) and all(_are_numbers(experts) for experts in found):
        return tuple(tuple(experts) for experts in found)
    raise CheckpointFormatError(f"{path}: expert_map is {found!r:.60}, not a list of expert numbers for each rank")


def _are_numbers(found: object) -> bool:
    return isinstance(found, list) and all(type(number) is int for number in found)


def _kv_scales(path: Path, found: object) -> KVScales | str | None:
    if found is None or isinstance(found, str):
        return found
    if isinstance(found, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in found):
        pairs = tuple((keys, values) for keys, values in found)
        if all(is_scale(number) for pair in pairs for number in pair):
            return pairs
    raise CheckpointFormatError(f"{path}: kv_scales is {found!r:.60}, not two numbers above 0 for each layer")


def _shard_file(path: Path, entry: object) -> ShardFile:
    if (
        isinstance(entry, dict)
        and set(entry) == set(ShardFile.__dataclass_fields__)
        and isinstance(entry["name"], str)
        and _PART.fullmatch(entry["name"])
        and type(entry["nbytes"]) is int
        and isinstance(entry["sha256"], str)
    ):
        return ShardFile(**entry)
    raise CheckpointFormatError(f"{path}: files has an entry that is none: {entry!r:.80}")


def _rank(name: str) -> int:
    found = _PART.fullmatch(name)
    assert found is not None  # checked when the manifest was read
    return int(found["rank"])


# --- options


def saved_options(saved: Mapping[str, Any], options: LoadOptions) -> LoadOptions:
    """The options with what the folder says of scheme, head and dtype. Raises OptionError where they say otherwise,
    and for those that would change nothing.

    `--quantization none`, the default, asks for nothing to be quantized while loading: the saved scheme stays.
    """
    scheme, dtype = str(saved["quantization"]), str(saved["dtype"])
    for name in ("quantization_config", "scale_percentile"):
        if getattr(options, name) is not None:
            raise OptionError(
                f"--{name.replace('_', '-')}: the shards are read as they were saved; leave the option out, or save "
                "them again from the original"
            )
    _check_scheme(options, parse_forms(saved["weights"]))
    if options.quantize_head and not saved["quantize_head"]:
        raise OptionError("--quantize-head: the shards were saved with a wide head; save them again from the original")
    asked = DTYPES[options.dtype]
    if asked is not None and asked.torch_name != dtype:
        raise OptionError(f"--dtype {options.dtype}: the shards were saved in {dtype}; leave the option out")
    if options.unwrap_names:
        raise OptionError("--unwrap-names: the shards have the model's own names; leave the option out")
    if not options.loader.weights_track:
        raise OptionError(
            "--model-loader-extra-config: enable_weights_track false: the shards are whole or refused; leave it out"
        )
    return replace(options, quantization=scheme, quantize_head=bool(saved["quantize_head"]) and scheme != "none")


def _check_scheme(options: LoadOptions, saved: SavedForms) -> None:
    """What is asked for by name must be what all quantized weights are in, by whichever name it is called."""
    if scheme_by_name(options.quantization).name not in ("none", _words(saved)):
        raise OptionError(
            f"--quantization {options.quantization}: the shards were saved with {_words(saved)}; leave the option out, "
            "or save them again from the original"
        )


def _words(weights: SavedForms) -> str:
    return " and ".join(sorted({form.scheme.name for form in weights.values()})) or "none"


def saved_specs(root: Path, saved: Mapping[str, Any], specs: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """The specs that `saved_policy` gave, with what lies joined. Raises CheckpointFormatError where the manifest is not
    of this model."""
    return as_saved(specs, parse_forms(saved["weights"]), where=str(root / MANIFEST))


def saved_policy(saved: Mapping[str, Any]) -> SavedPolicy:
    """The scheme of each parameter of the shards."""
    return SavedPolicy(parse_forms(saved["weights"]))


def same_source(manifest: Manifest, wanted: Manifest) -> bool:
    """Whether both were made from the same, in the same form."""
    return replace(manifest, files=()) == replace(wanted, files=())


def checksum_faults(root: Path, saved: Mapping[str, Any], *, names: Sequence[str]) -> list[str]:
    """Files whose bytes are no longer those that were saved, one line each; they are read whole."""
    from hashlib import file_digest

    faults = []
    for file in (file for file in saved["files"] if file["name"] in names):
        with (root / file["name"]).open("rb") as opened:
            found = file_digest(opened, "sha256").hexdigest()
        if found != file["sha256"]:
            faults.append(f"{root / file['name']}: its sha256 is {found}, but {MANIFEST} says {file['sha256']}")
    return faults

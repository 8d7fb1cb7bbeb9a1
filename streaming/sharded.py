"""Folders that save-shards wrote (load format `sharded_state`): the manifest, and what it must agree with. [no-torch]

    firstlayer_shards.json                      what follows, written last: without it the folder is not whole
    model-rank-00000-part-00000.safetensors     the stored tensors of one rank, under the names of the parameters
    config.json, tokenizer and generation files the model's own

A rank reads its own file only. The manifest says how each weight is kept (its scheme, and what the checkpoint itself
had joined), whether that was quantized while loading or came quantized; and the scales that the checkpoint held for an
fp8 KV cache. The stored form depends on the schemes, the dtype and the topology (how many ranks share the model, by
tensor and by expert), so a run that asks for others is refused: nothing is quantized twice. It is the form before a
device's post-processing, whatever device it was saved with, so nothing is processed twice either.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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
from streaming.options import DTYPES, LoadOptions
from streaming.saved_forms import SavedForms, SavedPolicy, as_saved, parse_forms

FORMAT = "sharded_state"
MANIFEST = SHARDED[0]
GGUF_METADATA = "gguf_metadata.json"  # the tokenizer and chat template of a model that was one GGUF file
VERSION = 2  # 1 said one scheme for all weights
_PART = re.compile(r"model-rank-(?P<rank>\d{5})-part-\d{5}\.safetensors")


@dataclass(frozen=True)
class Topology:
    """How many ranks share a model, and which one this is."""

    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    rank: int = 0

    def __str__(self) -> str:
        return f"tensor parallel size {self.tensor_parallel_size} and expert parallel size {self.expert_parallel_size}"


@dataclass(frozen=True)
class ShardFile:
    """One file of a manifest; `sha256` of all its bytes, in hexadecimal."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What firstlayer_shards.json says. `quantization` was asked for when it was saved; `weights` says what is so, for
    each weight that is not wide. `tied`: embedding and head are one matrix. `source`: a digest of what it was made
    from, to know the same again. `kv_scales`: of keys and of values, for each layer, or what is wrong with them."""

    tensor_parallel_size: int
    expert_parallel_size: int
    quantization: str
    quantize_head: bool
    dtype: str
    tied: bool
    source: str
    files: tuple[ShardFile, ...]
    weights: SavedForms
    kv_scales: KVScales | str | None = None

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
    """The checkpoint in such a folder. Raises CheckpointError with all problems of its files, and for a topology that
    is not this run's, with both."""
    if not root.is_dir():
        raise CheckpointError(f"{root}: is not a folder that save-shards wrote")
    if not is_sharded(list_folder(root)):
        raise CheckpointError(f"{root}: no {MANIFEST}; such folders are written by firstlayer save-shards")
    manifest = read_manifest(root)
    _check_topology(root, manifest, Topology())
    report = Report(root)
    config = read_member_object(root / CONFIG, report)
    metadata = read_member_object(root / GGUF_METADATA, report) if (root / GGUF_METADATA).exists() else {}
    files = [file for file in manifest.files if int(_rank(file.name)) == Topology().rank]
    paths = tuple(root / file.name for file in files)
    states = states_before(paths)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in _read_part(root, file, report).items():
            if name in tensors:
                report.add(f"tensor {name!r} is in {tensors[name].file} and in {info.file}", broken=True)
            tensors[name] = info
    report.raise_if_any()
    return Checkpoint(root, FORMAT, tensors, paths, config, metadata, saved=manifest.as_dict(), states=states)


def _check_topology(root: Path, manifest: Manifest, here: Topology) -> None:
    saved = Topology(manifest.tensor_parallel_size, manifest.expert_parallel_size)
    if str(saved) != str(here):
        raise CheckpointError(f"{root}: was saved for {saved}; this run has {here}: save it again for these")


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
    if found.get("version") != VERSION:
        raise CheckpointFormatError(
            f"{path}: is of version {found.get('version')!r:.60}; this program reads {VERSION}: save it again"
        )
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
    if found["dtype"] not in {dtype.torch_name for dtype in DType if dtype.is_wide}:
        raise CheckpointFormatError(f"{path}: dtype {found['dtype']!r} is none that weights are kept in")
    fields["files"] = tuple(_shard_file(path, entry) for entry in found["files"])
    return Manifest(**fields)  # type: ignore[arg-type]


_KINDS = {
    "tensor_parallel_size": int, "expert_parallel_size": int, "quantization": str, "quantize_head": bool,
    "dtype": str, "tied": bool, "source": str, "files": list, "weights": dict,
}  # fmt: skip


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


def _rank(name: str) -> str:
    found = _PART.fullmatch(name)
    assert found is not None  # checked when the manifest was read
    return found["rank"]


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

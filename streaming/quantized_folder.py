"""The folder that `firstlayer quantize` writes, as data: its files, their tensors, its config.json. [no-torch]

Hugging Face's layout with compressed-tensors' names (see compressed_layout) for the tensors of each module (see
quantized_modules).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from layers.architecture import HEAD_WEIGHT
from layers.config import weight_map
from layers.weights import ParamKind
from quant.scheme import StoredSpec
from streaming.compressed_layout import Layout, Written, layout_of, written_spec
from streaming.errors import OptionError
from streaming.prepare import Prepared
from streaming.quantized_modules import Module, check_modules, modules_of
from streaming.read_plan import ALIGNMENT

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class FolderTensor:
    """One tensor of the folder, and what it is made of."""

    name: str
    spec: StoredSpec
    module: Module
    written: Written


@dataclass(frozen=True)
class FolderFile:
    """One safetensors file, its tensors in the order in which they lie there."""

    name: str
    tensors: tuple[FolderTensor, ...]

    @cached_property
    def header(self) -> bytes:
        """Length and JSON of the file (https://github.com/huggingface/safetensors#format), padded so that data begin
        at a multiple of 64 bytes."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in self.tensors:
            offsets = [offset, offset + tensor.spec.nbytes]
            shape, dtype = list(tensor.spec.shape), tensor.spec.dtype.value
            entries[tensor.name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            offset = offsets[1]
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class FolderPlan:
    """The whole folder; `layers` in reading order, each with its tensors in the order of the files."""

    layers: tuple[tuple[str, tuple[FolderTensor, ...]], ...]
    files: tuple[FolderFile, ...]
    config: Mapping[str, Any]
    format: str

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.spec.nbytes for file in self.files for tensor in file.tensors)

    @property
    def index(self) -> dict[str, Any] | None:
        """The index of several files; None for one."""
        if len(self.files) == 1:
            return None
        names = {tensor.name: file.name for file in self.files for tensor in file.tensors}
        return {"metadata": {"total_size": self.nbytes}, "weight_map": names}


def plan_folder(prepared: Prepared, *, max_shard_nbytes: int) -> FolderPlan:
    """What quantizing this model writes. Raises OptionError for a model, a scheme or a size that cannot be written."""
    check_model(prepared)
    modules = {layer.name: list(modules_of(layer, prepared)) for layer in prepared.plan.layers}
    every = [module for found in modules.values() for module in found]
    if not any(module.is_quantized for module in every):
        raise OptionError("--quantization: which scheme is needed, such as fp8_per_channel (or --quantization-config)")
    check_modules(every)
    layers = [(name, tuple(t for module in found for t in _tensors_of(module))) for name, found in modules.items()]
    config = _config(prepared, every)
    files = _files([tensor for _, found in layers for tensor in found], max_shard_nbytes=max_shard_nbytes)
    return FolderPlan(tuple(layers), files, config, config["quantization_config"]["format"])


def check_model(prepared: Prepared) -> None:
    """Raise OptionError, with what to do, for a model that has no such folder."""
    checkpoint, name = prepared.checkpoint, prepared.checkpoint.name
    if checkpoint.saved is not None:
        raise OptionError(f"{name}: was written by save-shards and is quantized already; start from the original")
    asked = prepared.options.default_scheme.name != "none" or prepared.options.quantization_rules is not None
    if not asked and any(param.forms for spec in prepared.specs for param in spec.params):
        raise OptionError(f"{name}: is quantized already; start from the original, or say what to make of it")
    if prepared.config.moe is not None and prepared.config.moe.expert_bias:
        raise OptionError(f"{name}: its experts have biases, which the compressed-tensors layout lacks")
    if checkpoint.format == "dummy":
        raise OptionError("--load-format dummy: its weights are made up, there is nothing to write")
    if isinstance(checkpoint.config.get("text_config"), Mapping):
        raise OptionError(f"{name}: is a multimodal model, of which only the text part is read here")
    if weight_map(prepared.config).transposed:
        model_type = checkpoint.config.get("model_type")
        raise OptionError(
            f"{name}: {model_type} keeps its matrices [in, out], which the compressed-tensors layout lacks"
        )


# --- tensors and files


def _tensors_of(module: Module) -> Iterator[FolderTensor]:
    param = module.param
    if not module.is_quantized:
        spec = StoredSpec((sum(module.rows), *param.shape[1:]), param.dtype)
        written = Written(module.leaf, param.name.rpartition(".")[2])
        yield FolderTensor(f"{module.name}.{module.leaf}", spec, module, written)
        return
    rows, in_features = module.rows, param.shape[1]
    stored = param.scheme.storage(rows, in_features, wide=param.dtype)
    for written in layout_of(param.scheme).written:
        spec = written_spec(
            written.form, stored, written.source, rows=sum(rows), in_features=in_features, wide=param.dtype
        )
        yield FolderTensor(f"{module.name}.{written.name}", spec, module, written)


def _files(tensors: Sequence[FolderTensor], *, max_shard_nbytes: int) -> tuple[FolderFile, ...]:
    """The tensors in their order, as many in a file as fit (one that is larger has a file of its own)."""
    runs: list[list[FolderTensor]] = [[]]
    taken = 0
    for tensor in tensors:
        if runs[-1] and taken + tensor.spec.nbytes > max_shard_nbytes:
            runs.append([])
            taken = 0
        runs[-1].append(tensor)
        taken += tensor.spec.nbytes
    if len(runs) == 1:
        return (FolderFile("model.safetensors", tuple(runs[0])),)
    count = len(runs)
    return tuple(FolderFile(f"model-{i + 1:05d}-of-{count:05d}.safetensors", tuple(run)) for i, run in enumerate(runs))


# --- config.json


def _config(prepared: Prepared, modules: Sequence[Module]) -> dict[str, Any]:
    config = dict(prepared.checkpoint.config)
    dtype = "dtype" if "dtype" in config else "torch_dtype"
    config[dtype] = prepared.dtype.torch_name
    if any(module.param.name == HEAD_WEIGHT and module.is_quantized for module in modules):
        config["tie_word_embeddings"] = False  # a quantized head is a matrix of its own
    config.pop("compression_config", None)  # an older name of what follows
    return config | {"quantization_config": quantization_config(modules)}


def quantization_config(modules: Sequence[Module]) -> dict[str, Any]:
    """What config.json says of these modules: a group of all linear modules where they have one scheme, else a group
    for each scheme that names its own; what stays wide is ignored by name."""
    groups: dict[Layout, list[str]] = {}
    for module in modules:
        if module.is_quantized:
            groups.setdefault(layout_of(module.param.scheme), []).append(module.name)
    formats = {layout.format for layout in groups}
    sole = len(groups) == 1
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "config_groups": {
            f"group_{index}": layout.group(["Linear"] if sole else names)
            for index, (layout, names) in enumerate(groups.items())
        },
        "ignore": _ignored(modules),
    }


def _ignored(modules: Sequence[Module]) -> list[str]:
    """Linear modules that stay wide, routers among them. The head is one even where it has no tensor of its own."""
    linear = (ParamKind.LINEAR, ParamKind.HEAD, ParamKind.ROUTER, ParamKind.ABSORBED)
    wide = {m.name: None for m in modules if m.param.kind in linear and not m.is_quantized}
    if not any(m.param.kind is ParamKind.HEAD for m in modules):
        wide["lm_head"] = None
    return list(wide)

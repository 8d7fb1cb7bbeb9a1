"""The folder that `firstlayer quantize` writes, as data: its files, their tensors, its config.json. [no-torch]

Hugging Face's layout with compressed-tensors' names (see compressed_layout). Tensors bear the names that the family's
checkpoints have, so a fused parameter is written as its parts (q_proj, k_proj, v_proj), each with its own scales; what
the family's own modules keep in one (phi3's qkv_proj) stays in one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from layers.architecture import EMBED_WEIGHT, HEAD_WEIGHT
from layers.config import weight_map
from layers.fused_experts import EXPERTS
from layers.weights import ParamKind, ParamSpec
from quant.scheme import StoredSpec
from streaming.compressed_layout import Layout, Written, layout_of, written_spec
from streaming.errors import OptionError
from streaming.plan import LayerPlan, LoadItem
from streaming.prepare import Prepared
from streaming.read_plan import ALIGNMENT

INDEX = "model.safetensors.index.json"
_FUSED = ("qkv_proj", "gate_up_proj")
_ONE_MODULE = {"phi3": _FUSED, "glm": ("gate_up_proj",), "glm4": ("gate_up_proj",)}  # there they are one module
_NAMED = 3  # modules that a message names one by one


@dataclass(frozen=True)
class Module:
    """A module of the checkpoint: the sections [first, stop) of a parameter, whose tensor is `name`.`leaf`."""

    name: str
    leaf: str
    param: ParamSpec
    first: int
    stop: int

    @property
    def section_rows(self) -> tuple[int, ...]:
        """Rows of each of its sections."""
        return self.param.section_rows[self.first : self.stop]

    @cached_property
    def parts(self) -> range | None:
        """Which of the parts that the scheme treats by themselves it is; None where one reaches over its edge."""
        ends = [0, *accumulate(self.param.kept_rows)]
        start, stop = self.param.section_starts[self.first], self.param.section_starts[self.stop]
        return range(ends.index(start), ends.index(stop)) if start in ends and stop in ends else None

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each of those parts; of each section where there is no telling."""
        return self.section_rows if self.parts is None else tuple(self.param.kept_rows[part] for part in self.parts)

    @property
    def is_quantized(self) -> bool:
        """Whether it is not written as its wide numbers."""
        return self.param.kind in (ParamKind.LINEAR, ParamKind.HEAD) and self.param.scheme.name != "none"


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
    modules = {layer.name: list(_modules_of(layer, prepared)) for layer in prepared.plan.layers}
    every = [module for found in modules.values() for module in found]
    if not any(module.is_quantized for module in every):
        raise OptionError("--quantization: which scheme is needed, such as fp8_per_channel (or --quantization-config)")
    _check_modules(every)
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


# --- modules


def _modules_of(layer: LayerPlan, prepared: Prepared) -> Iterator[Module]:
    whole = _ONE_MODULE.get(str(prepared.checkpoint.config.get("model_type")), ())
    items: dict[str, list[LoadItem]] = {}
    for item in layer.items:
        items.setdefault(item.param.name, []).append(item)
    for param in layer.spec.params:
        names = _names(items[param.name], prepared)
        last = param.name.split(".")[-2]
        if EXPERTS in param.name:
            yield from _experts(param, names, prepared)
        elif last in _FUSED:
            yield from _usual_parts(param, names[0], prepared, whole=last in whole)
        elif param.name in (EMBED_WEIGHT, HEAD_WEIGHT):  # a tied matrix may lie under either name
            own = names[0].endswith(param.name.removeprefix("model."))
            yield _module(names[0] if own else param.name, param, 0, 1)
        else:
            yield from _parts_on_disk(param, names)


def _names(items: Iterable[LoadItem], prepared: Prepared) -> dict[int, str]:
    """The name of the tensor that each section begins in; that of the weight, where it is quantized on disk."""
    unwrapped = {there: name for name, there in prepared.plan.unwrapped.items()}
    found = {}
    for item in items:
        name = unwrapped.get(item.tensor.name, item.tensor.name)
        first = f"{name.rpartition('.')[0]}.weight" if item.leaf else name
        found.update(dict.fromkeys(range(item.section, item.section + item.sections), first))
    return found


def _experts(param: ParamSpec, names: Mapping[int, str], prepared: Prepared) -> Iterator[Module]:
    """A module for each expert and part: as this checkpoint has them, or the family, where they are one tensor here."""
    projection = param.name.split(".")[-2]
    rules = [r for r in weight_map(prepared.config).experts if r.target == projection and r.stop - r.first == 1]
    usual = {rule.first: rule.source for rule in reversed(rules)}  # the first rule of each part is the family's own
    parts = {rule.source: rule.first for rule in rules}
    for section in range(len(param.sections)):
        expert, part = divmod(section, rules[0].of)
        before, _, behind = names[section].partition(EXPERTS)
        last = behind.split(".")[-2] if behind.count(".") > 1 else ""
        source = last if parts.get(last) == part else usual[part]
        yield Module(f"{before}{EXPERTS}{expert}.{source}", "weight", param, section, section + 1)


def _module(name: str, param: ParamSpec, first: int, stop: int) -> Module:
    module, _, leaf = name.rpartition(".")
    return Module(module, leaf, param, first, stop)


def _usual_parts(param: ParamSpec, name: str, prepared: Prepared, *, whole: bool) -> Iterator[Module]:
    """The parts of a fused parameter as the family's modules have them, whatever this checkpoint does."""
    module, _, leaf = name.rpartition(".")
    parent, target = module.rpartition(".")[0], param.name.split(".")[-2]
    if whole:
        yield Module(f"{parent}.{target}", leaf, param, 0, len(param.sections))
        return
    for rule in weight_map(prepared.config).stacked:
        if rule.target == target and rule.source != target:
            yield Module(f"{parent}.{rule.source}", leaf, param, rule.first, rule.stop)


def _parts_on_disk(param: ParamSpec, names: Mapping[int, str]) -> Iterator[Module]:
    starts = [section for section in sorted(names) if names.get(section - 1) != names[section]]
    for first, stop in zip(starts, [*starts[1:], len(param.sections)], strict=True):
        yield _module(names[first], param, first, stop)


def _check_modules(modules: Iterable[Module]) -> None:
    """Raise OptionError for the quantized modules that have no place in the layout."""
    faults = [fault for module in modules if module.is_quantized for fault in _faults(module)]
    if faults:
        more = f"; {len(faults) - _NAMED} more like these" if len(faults) > _NAMED else ""
        raise OptionError(f"--quantization: cannot be written: {'; '.join(faults[:_NAMED])}{more}")


def _faults(module: Module) -> Iterator[str]:
    scheme, columns = module.param.scheme, module.param.shape[1]
    layout = layout_of(scheme)
    if module.parts is None:
        yield f"{module.name} shares its scales with its neighbours on disk"
    if columns % layout.columns:
        yield f"{module.name} has {columns} inputs, and {scheme.name} needs a multiple of {layout.columns} there"
    if len(module.rows) > 1 and layout.row_multiple == 0:
        yield f"{module.name} is one tensor of {len(module.rows)} parts, and {scheme.name} has one scale for it there"
    elif layout.row_multiple and any(rows % layout.row_multiple for rows in module.rows[:-1]):
        yield f"{module.name} is one tensor whose parts of {list(module.rows)} rows share blocks of {scheme.name} there"


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

"""Load format `dummy`: a model whose weights are made up, to measure memory and compute without a file. [no-torch]

Nothing is read but config.json. Every tensor is a run of an endless pattern (see streaming.dummy_pattern) that begins
where a hash of the seed and of the tensor's own name says; norms' weights are 1. So any run of rows can be made by
itself, whatever the order, the threads and the machine, and a rank's slice is the slice of the whole.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

from layers.architecture import layer_specs
from layers.config import parse_config, weight_map
from layers.weights import LayerSpec, ParamKind, WeightMap
from quant.dtypes import DType
from quant.policy import QuantPolicy
from streaming.checkpoint.files import read_json_object
from streaming.checkpoint.members import CONFIG
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.dummy_pattern import BLOCK_VALUES, fill_patterns
from streaming.errors import CheckpointError, OptionError
from streaming.matching import checkpoint_name
from streaming.options import LoadOptions
from streaming.read_plan import ReadPlan
from streaming.reader import ProcessReader, Reader, ThreadReader

FORMAT = "dummy"
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from streaming.dummy_reading import main; main()"
_RANDOM, _ONES = "random", "ones"
_OF_FILES = (
    "safetensors_load_strategy", "safetensors_prefetch_num_threads", "safetensors_prefetch_block_size",
    "model_loader_extra_config", "unwrap_names",
)  # fmt: skip


def open_dummy(path: Path) -> Checkpoint:
    """The made-up checkpoint for a config.json, or the folder that holds one; seed 0 (see `reseeded`)."""
    file = path / CONFIG if path.is_dir() else path
    if file.suffix != ".json":
        raise CheckpointError(f"{file}: format dummy takes a model's config.json, or the folder that holds it")
    raw = read_json_object(file)
    config = parse_config(raw, where=str(file))
    dtype = config.dtype or DType.BF16
    specs = layer_specs(config, dtype=dtype, policy=QuantPolicy())
    tensors = {
        name: _made_up(name, shape, dtype, pattern=pattern)
        for name, (shape, pattern) in _shapes(specs, own_names(weight_map(config))).items()
    }
    notes = ("format dummy: the weights are made up; what the model says means nothing",)
    return reseeded(Checkpoint(path, FORMAT, tensors, (), raw, {}, notes=notes), seed=0)


def reseeded(checkpoint: Checkpoint, *, seed: int) -> Checkpoint:
    """The same with the numbers of another seed."""
    tensors = {name: replace(info, offset=_start(info, seed)) for name, info in checkpoint.tensors.items()}
    return replace(checkpoint, tensors=tensors)


def check_dummy_options(options: LoadOptions) -> None:
    """Refuse what says how files are read: there are none."""
    for name in _OF_FILES:
        if value := getattr(options, name):
            given = "" if value is True else f" {value}"
            raise OptionError(f"--{name.replace('_', '-')}{given}: format dummy reads no files")


def _shapes(specs: Sequence[LayerSpec], names: WeightMap) -> dict[str, tuple[tuple[int, ...], str]]:
    """Every tensor of a usual checkpoint: its shape, out_features first, and the pattern that fills it."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for param in (param for spec in specs for param in spec.params):
        for section, rows in enumerate(param.section_rows):
            name = checkpoint_name(param, section, names)
            before = found[name][0][0] if name in found else 0  # a family may keep fused what others keep in parts
            pattern = _ONES if param.kind is ParamKind.NORM and name.endswith(".weight") else _RANDOM
            found[name] = ((before + rows, *param.shape[1:]), pattern)
    return found


def own_names(names: WeightMap) -> WeightMap:
    """How made-up tensors are called: as the parameters are, with the parts of fused ones by themselves; each matrix
    is [out, in]."""
    return WeightMap(stacked=names.stacked, experts=names.experts)


def _made_up(name: str, shape: tuple[int, ...], dtype: DType, *, pattern: str) -> TensorInfo:
    """`file` names no file but an endless pattern, in which the tensor begins at `offset`."""
    nbytes = prod(shape) * dtype.itemsize
    return TensorInfo(name, shape, dtype, Path(f"{pattern}.{dtype.value}"), 0, nbytes, generated=True)


def _start(info: TensorInfo, seed: int) -> int:
    if info.file.name.startswith(_ONES):
        return 0
    digest = hashlib.blake2b(f"{seed}:{info.name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % BLOCK_VALUES * info.dtype.itemsize


def open_dummy_reader(read_plan: ReadPlan, *, threads: bool) -> Reader:
    """A reader that makes the bytes up: in a process of its own, or on threads of this one."""
    patterns = [file.name for file in read_plan.files]
    if threads or not hasattr(os, "memfd_create"):
        return ThreadReader(read_plan, fill_of=partial(fill_patterns, patterns))
    program = ("-I", "-S", "-c", _PROGRAM, str(Path(__file__).parents[1]))
    return ProcessReader(replace(read_plan, files=()), program=program, job={"patterns": patterns})

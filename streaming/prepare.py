"""From a name on the command line to a plan: everything that headers can tell, in tenths of a second, without torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from layers.architecture import layer_specs
from layers.config import parse_config, weight_map
from layers.kv_cache import kv_cache_nbytes
from layers.model_config import ModelConfig
from layers.weights import LayerSpec
from quant.dtypes import DType
from quant.policy import default_policy
from quant.registry import scheme_by_name
from streaming.budget import Budget, make_budget
from streaming.checkpoint import open_checkpoint
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.errors import OptionError
from streaming.options import DTYPES, LoadOptions
from streaming.plan import LoadPlan, make_plan
from streaming.read_plan import ReadPlan, plan_reads

DEFAULT_CACHE_TOKENS = 2048  # what the budget sets aside when no --max-model-len is given


@dataclass(frozen=True)
class Prepared:
    """A model that is planned and not yet read."""

    options: LoadOptions
    checkpoint: Checkpoint
    config: ModelConfig
    dtype: DType
    specs: tuple[LayerSpec, ...]
    plan: LoadPlan
    budget: Budget
    read_plan: ReadPlan
    retie: bool  # the config ties embedding and head, yet both are on disk: compared when both have arrived

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know before the load."""
        return (*self.checkpoint.notes, *self.plan.warnings)


def prepare(model: str, options: LoadOptions) -> Prepared:
    """Open the headers, parse the config, plan the load.

    Raises CheckpointError with all problems of the files, ModelConfigError, OptionError, BudgetError; reads no weights.
    """
    checkpoint = open_checkpoint(model, load_format=options.load_format, revision=options.revision)
    config = parse_config(checkpoint.config)
    dtype = resolve_dtype(options.dtype, config, checkpoint)
    check_length(options.max_model_len, config)
    names = {name.rpartition("lm_head.")[2] if "lm_head." in name else name for name in checkpoint.tensors}
    both = config.tie_word_embeddings and "weight" in names and any("embed_tokens." in name for name in names)
    tied = config.tie_word_embeddings and not both
    policy = default_policy(scheme_by_name(options.quantization), quantize_head=options.quantize_head)
    specs = layer_specs(config, dtype=dtype, policy=policy, tied=tied)
    plan = make_plan(
        checkpoint, specs, weight_map(config), tied=tied, direct=options.device == "cpu", is_zero=holds_only_zeros,
        unwrap=options.unwrap_names,
    )  # fmt: skip
    tokens = options.max_model_len or min(DEFAULT_CACHE_TOKENS, config.max_position_embeddings)
    budget = make_budget(
        plan,
        window_nbytes=options.window_nbytes,
        cache_nbytes=kv_cache_nbytes(config, max_tokens=tokens, dtype=dtype),
        limit_nbytes=options.memory_nbytes,
        packs=options.kernels == "fast" and options.device == "cpu",
    )
    read_plan = plan_reads(plan, window_nbytes=options.window_nbytes or budget.window_nbytes)
    return Prepared(options, checkpoint, config, dtype, specs, plan, budget, read_plan, both)


def resolve_dtype(asked: str, config: ModelConfig, checkpoint: Checkpoint) -> DType:
    """The dtype of the shell: as asked, else the config's, else the files' most frequent float dtype by bytes."""
    if (named := DTYPES[asked]) is not None:
        return named
    if config.dtype is not None:
        return config.dtype
    found: Counter[DType] = Counter()
    for tensor in checkpoint.tensors.values():
        if tensor.dtype.is_wide:
            found[DType.BF16 if tensor.encoding else tensor.dtype] += tensor.numel
    return found.most_common(1)[0][0] if found else DType.BF16


def check_length(max_model_len: int | None, config: ModelConfig) -> None:
    """Refuse a context longer than the model's positions."""
    if max_model_len is not None and max_model_len > config.max_position_embeddings:
        raise OptionError(
            f"--max-model-len {max_model_len} is more than the model's max_position_embeddings "
            f"({config.max_position_embeddings})"
        )


def holds_only_zeros(tensor: TensorInfo) -> bool:
    """Whether the tensor's bytes are all zero (or the sign bits of negative zeros); for small tensors: it is read."""
    with open(tensor.file, "rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.nbytes)
    last = tensor.dtype.itemsize - 1  # little endian: the sign stands in a number's last byte
    signs = data[last :: tensor.dtype.itemsize]
    numbers = (data[offset :: tensor.dtype.itemsize] for offset in range(last))
    return len(data) == tensor.nbytes and not any(map(any, numbers)) and not signs.strip(b"\x00\x80")

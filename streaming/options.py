"""What a user can ask of a load: one frozen value, checked before anything is read. Needs no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from layers.errors import ShardError
from layers.kv_forms import CACHE_DTYPES
from layers.topology import PLACEMENTS, Topology
from quant.dtypes import DType
from quant.errors import QuantError
from quant.registry import scheme_by_name, scheme_names
from streaming.errors import OptionError
from streaming.loader_options import MOST_THREADS, LoaderOptions, parse_loader_options
from streaming.read_strategy import BACK_ENDS, STRATEGIES
from streaming.sizes import parse_size
from streaming.sources import Source

if TYPE_CHECKING:
    from quant.policy_file import QuantizationConfig
    from quant.scheme import Scheme

DTYPES = {
    "auto": None, "half": DType.F16, "float16": DType.F16, "bfloat16": DType.BF16,
    "float": DType.F32, "float32": DType.F32,
}  # fmt: skip
KERNELS = ("default", "fast", "exact")
ACTIVATION_DTYPES = ("auto", "int8")
READERS = ("process", "threads")
READ_SHARING = ("none", "shared")
MOE_LOADS = ("layers", "routed_first")
MOST_RANKS = 4096  # more in one direction is a slip of the pen
LONGEST_RANK_TIMEOUT_S = 604_800  # what is longer overflows somewhere


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of opening a model; each is a command line option of the same name with dashes.

    Sizes are bytes or words ("512MiB"). None means: chosen by the runtime.
    """

    load_format: str = "auto"
    safetensors_load_strategy: str | None = None
    safetensors_prefetch_num_threads: int | None = None
    safetensors_prefetch_block_size: str | int | None = None
    model_loader_extra_config: Mapping[str, object] | str | None = None
    quantization: str = "none"
    quantize_head: bool = False
    quantization_config: Mapping[str, object] | str | None = None  # scheme per pattern: or JSON, or its file
    scale_percentile: float | None = None  # scales of the default scheme from it; None: from the largest magnitude
    dtype: str = "auto"
    device: str = "cpu"
    memory: str | int | None = None
    gpu_memory: str | int | None = None  # of a GPU; None: `memory` says it
    host_memory: str | int | None = None  # beside a GPU's; on the CPU the same as `memory`
    window: str | int | None = None
    max_model_len: int | None = None
    kernels: str = "default"
    kv_cache_dtype: str = "auto"
    activation_dtype: str = "auto"
    threads: int | None = None
    reader: str = "process"
    check_weights: bool = False
    moe_load: str = "layers"  # or routed_first: experts when tokens are routed to them, the others behind
    unwrap_names: bool = False
    revision: str | None = None
    sources: Sequence[Source] = ()  # further places that tensors come from
    remote_cache: str | None = None
    cache_dir: str | None = None  # where stored weights of models larger than the memory are kept for later runs
    cache_size: str | int | None = None  # of all models there; 0: nothing is kept on disk
    seed: int | None = None  # of made-up weights (load format dummy; 0 when not given)
    tensor_parallel_size: int = 1
    expert_parallel_size: int | None = None
    enable_expert_parallel: bool = False  # alone: as many expert ranks as tensor ranks
    pipeline_parallel_size: int = 1
    expert_placement: str = "linear"
    expert_map: str | Sequence[Sequence[int]] | None = None  # the experts of each rank: lists, JSON, or its file
    read_sharing: str = "none"  # "shared": what ranks of a tensor group want in common is read by one of them
    rank_timeout: float = 60.0  # seconds that a rank may keep the others waiting; more than a step takes

    def __post_init__(self) -> None:
        for name in ("quantization", "dtype", "device", "load_format", "kernels", "moe_load"):
            if not isinstance(value := getattr(self, name), str):
                raise OptionError(f"--{name.replace('_', '-')} {value!r}: a name is needed")
        _one_of("--dtype", self.dtype, tuple(DTYPES))
        _one_of("--kernels", self.kernels, KERNELS)
        _one_of("--reader", self.reader, READERS)
        _one_of("--moe-load", self.moe_load, MOE_LOADS)
        _one_of("--kv-cache-dtype", self.kv_cache_dtype, CACHE_DTYPES)
        _one_of("--activation-dtype", self.activation_dtype, ACTIVATION_DTYPES)
        if self.activation_dtype != "auto" and self.kernels == "fast":
            raise OptionError("--activation-dtype int8 does not go with --kernels fast, whose activations are wide")
        if self.safetensors_load_strategy is not None:
            _one_of("--safetensors-load-strategy", self.safetensors_load_strategy, STRATEGIES)
        self._check_reading()
        self._check_quantization()
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise OptionError(f"--device {self.device}: known devices are cpu and cuda[:index]")
        if self.remote_cache is not None and (not self.remote_cache or os.path.isfile(self.remote_cache)):
            raise OptionError(f"--remote-cache {self.remote_cache!r}: a folder is needed")
        self._check_stored_cache()
        if isinstance(self.sources, Source) or not all(isinstance(source, Source) for source in self.sources):
            raise OptionError(f"sources {self.sources!r}: a list of Source values is needed")
        _positive("--max-model-len", self.max_model_len)
        _positive("--threads", self.threads)
        if self.seed is not None and (type(self.seed) is not int or self.seed < 0):
            raise OptionError(f"--seed {self.seed!r}: a whole number of at least 0 is needed")
        self._check_ranks()
        self._check_memory()

    def _check_memory(self) -> None:
        limits = (("--memory", self.memory), ("--gpu-memory", self.gpu_memory), ("--host-memory", self.host_memory))
        for name, value in limits:
            _limit_nbytes(value, option=name)
        _ = self.window_nbytes
        if self.gpu_memory is not None and not self.is_on_gpu:
            raise OptionError(f"--gpu-memory {self.gpu_memory} needs --device cuda; on the CPU --memory is the limit")
        (flag, value), given = self.memory_limit, self.memory
        if given is not None and _limit_nbytes(given, option="--memory") != _limit_nbytes(value, option=flag):
            raise OptionError(f"--memory {given} and {flag} {value} limit the same memory: give one of them")

    def _check_stored_cache(self) -> None:
        folder = self.cache_dir
        if folder is not None and (not folder or os.path.isfile(folder)):
            raise OptionError(f"--cache-dir {folder!r}: a folder is needed")
        if self.cache_limit_nbytes == 0 and folder is not None:
            raise OptionError(f"--cache-dir {folder} and --cache-size 0, which keeps nothing there: give one of them")

    def _check_ranks(self) -> None:
        """The mesh."""
        for name in ("tensor_parallel_size", "expert_parallel_size", "pipeline_parallel_size"):
            _positive(f"--{name.replace('_', '-')}", getattr(self, name), most=MOST_RANKS)
        _one_of("--expert-placement", self.expert_placement, PLACEMENTS)
        _one_of("--read-sharing", self.read_sharing, READ_SHARING)
        if self.read_sharing != "none" and self.tensor_parallel_size == 1:
            raise OptionError(
                f"--read-sharing {self.read_sharing} is between ranks that share each layer: give a "
                "--tensor-parallel-size of at least 2"
            )
        if type(self.rank_timeout) not in (int, float) or not 0 < self.rank_timeout <= LONGEST_RANK_TIMEOUT_S:
            raise OptionError(
                f"--rank-timeout {self.rank_timeout!r}: seconds are needed, more than 0 and at most "
                f"{LONGEST_RANK_TIMEOUT_S:,} (a week)"
            )
        unfit = "--expert-map" if self.expert_map is not None else ""
        unfit = "--expert-placement" if self.expert_placement != PLACEMENTS[0] else unfit
        if self.topology().expert == 1 and unfit:
            raise OptionError(f"{unfit} is for ranks that share the experts: give an --expert-parallel-size too")

    def topology(self, rank: int = 0) -> Topology:
        """The ranks that share the model, seen from one of them. Raises OptionError for sizes that make no mesh."""
        tensor, expert = self.tensor_parallel_size, self.expert_parallel_size
        try:
            return Topology(
                tensor=tensor,
                expert=expert or (tensor if self.enable_expert_parallel else 1),
                pipeline=self.pipeline_parallel_size,
                rank=rank,
                placement=self.expert_placement,
                expert_map=self._parsed_map(),
            )
        except ShardError as error:
            names = [flag for flag, given in self._mesh_flags() if given]
            raise OptionError(f"{' and '.join(names) or '--tensor-parallel-size'}: {error}") from None

    def _parsed_map(self) -> tuple[tuple[int, ...], ...] | None:
        if self.expert_map is None:
            return None
        from streaming.ranks.expert_map import parse_expert_map

        return parse_expert_map(self.expert_map)

    def _mesh_flags(self) -> tuple[tuple[str, bool], ...]:
        return (
            ("--tensor-parallel-size", self.tensor_parallel_size > 1),
            ("--expert-parallel-size", self.expert_parallel_size is not None),
            ("--enable-expert-parallel", self.enable_expert_parallel),
            ("--expert-map", self.expert_map is not None),
        )

    def _check_reading(self) -> None:
        """What goes with which strategy."""
        strategy, back_end = self.safetensors_load_strategy, self.load_format in BACK_ENDS
        _positive("--safetensors-prefetch-num-threads", self.safetensors_prefetch_num_threads, most=MOST_THREADS)
        _ = self.prefetch_block_nbytes
        for name in ("safetensors_prefetch_num_threads", "safetensors_prefetch_block_size"):
            if getattr(self, name) is not None and (back_end or strategy not in (None, "prefetch")):
                flag = f"--{name.replace('_', '-')}"
                raise OptionError(f"{flag} goes with --safetensors-load-strategy prefetch, not {strategy or 'this'}")
        if self.load_format in BACK_ENDS and strategy is not None:
            raise OptionError(
                f"--safetensors-load-strategy {strategy} does not go with --load-format {self.load_format}, whose "
                "package reads in its own way"
            )
        if back_end and self.reader != "process":
            raise OptionError(f"--reader {self.reader} does not go with --load-format {self.load_format}")
        if self.loader.multithreaded and (back_end or strategy not in (None, "lazy")):
            other = f"--load-format {self.load_format}" if back_end else f"--safetensors-load-strategy {strategy}"
            raise OptionError(
                "--model-loader-extra-config: multi-threaded loading (enable_multithread_load, num_threads) goes with "
                f"no --safetensors-load-strategy or with lazy, not with {other}"
            )

    def _check_quantization(self) -> None:
        """The schemes and what goes with them."""
        try:
            scheme_by_name(self.quantization)
        except QuantError as error:
            if self.quantization.partition(":")[0] in scheme_names():  # what stands behind the colon is wrong
                raise OptionError(f"--{error}") from None
            _one_of("--quantization", self.quantization, tuple(scheme_names()))
        rules = self.quantization_rules
        if rules is not None and rules.default is not None and self.quantization != "none":
            raise OptionError(
                f"--quantization {self.quantization} and --quantization-config, whose default is "
                f"{rules.default.name}: give one of the two"
            )
        if self.default_scheme.name == "none" and self.quantize_head:
            raise OptionError("--quantize-head needs a --quantization other than none")

    @cached_property
    def quantization_rules(self) -> QuantizationConfig | None:
        """What --quantization-config says, as it was when it was first asked for."""
        if self.quantization_config is None:
            return None
        from streaming.quantization_config import read_quantization_config

        return read_quantization_config(self.quantization_config)

    @property
    def default_scheme(self) -> Scheme:
        """The scheme of what no rule names. OptionError where it takes no percentile and one is given."""
        rules = self.quantization_rules
        scheme = scheme_by_name(self.quantization) if rules is None or rules.default is None else rules.default
        if self.scale_percentile is None:
            return scheme
        from quant.percentile import with_percentile

        try:
            return with_percentile(scheme, self.scale_percentile)
        except QuantError as error:
            raise OptionError(f"--scale-percentile {self.scale_percentile}: {error}") from None

    @property
    def quantization_words(self) -> str:
        """What is asked for, for people: the default scheme's name and what goes with it."""
        percentile = "" if self.scale_percentile is None else f" at percentile {self.scale_percentile:g}"
        rules = "" if self.quantization_config is None else " with rules"
        return f"{self.default_scheme.name}{percentile}{rules}"

    @property
    def loader(self) -> LoaderOptions:
        """What --model-loader-extra-config says."""
        return parse_loader_options(self.model_loader_extra_config)

    @property
    def prefetch_block_nbytes(self) -> int | None:
        """Bytes of a block that is prefetched."""
        value = self.safetensors_prefetch_block_size
        return None if value is None else parse_size(value, option="--safetensors-prefetch-block-size")

    @property
    def is_on_gpu(self) -> bool:
        """Whether the memory that is computed in is not the host's."""
        return self.device != "cpu"

    @property
    def memory_limit(self) -> tuple[str, str | int | None]:
        """The option that limits the memory that is computed in, and what it says."""
        own = ("--gpu-memory", self.gpu_memory) if self.is_on_gpu else ("--host-memory", self.host_memory)
        return ("--memory", self.memory) if own[1] is None else own

    @property
    def memory_nbytes(self) -> int | None:
        """The limit of the memory that is computed in, in bytes; None where none is given as a size."""
        flag, value = self.memory_limit
        return None if value == "auto" else _limit_nbytes(value, option=flag)

    @property
    def host_nbytes(self) -> int | None:
        """The limit of the host's memory beside a GPU, in bytes; None where none is given as a size."""
        return None if self.host_memory == "auto" else _limit_nbytes(self.host_memory, option="--host-memory")

    def within_memory(self, memory: str | int | None) -> LoadOptions:
        """The same with another limit, or none, of the memory that is computed in."""
        host = self.host_memory if self.is_on_gpu else None
        return replace(self, memory=memory, gpu_memory=None, host_memory=host)

    @property
    def cache_limit_nbytes(self) -> int | None:
        """The most bytes that stored weights of all models may take in the cache folder; 0: nothing is kept there."""
        if self.cache_size is None or str(self.cache_size) == "0":
            return None if self.cache_size is None else 0
        return parse_size(self.cache_size, option="--cache-size")

    @property
    def window_nbytes(self) -> int | None:
        """The look-ahead limit in bytes."""
        return None if self.window is None else parse_size(self.window, option="--window")


def _limit_nbytes(value: str | int | None, *, option: str) -> int | None:
    """Bytes of a limit; None where there is none, and -1, which no limit is, for "auto"."""
    if value is None:
        return None
    return -1 if value == "auto" else parse_size(value, option=option)


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise OptionError(f"{option} {value!r} is not known: choose one of {', '.join(known)}")


def _positive(option: str, value: object, *, most: int | None = None) -> None:
    if isinstance(value, int) and most is not None and value > most:
        raise OptionError(f"{option} {value!r}: at most {most} make sense")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise OptionError(f"{option} {value!r}: a whole number of at least 1 is needed")

"""What a user can ask of a load: one frozen value, checked before anything is read. Needs no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quant.dtypes import DType
from quant.errors import QuantError
from quant.registry import scheme_by_name, scheme_names
from streaming.errors import OptionError
from streaming.sizes import parse_size

DTYPES = {
    "auto": None, "half": DType.F16, "float16": DType.F16, "bfloat16": DType.BF16,
    "float": DType.F32, "float32": DType.F32,
}  # fmt: skip
KERNELS = ("default", "fast", "exact")
STRATEGIES = ("direct",)
READERS = ("process", "threads")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of opening a model; each is a command line option of the same name with dashes.

    Sizes are bytes or words ("512MiB"). None means: chosen by the runtime.
    """

    load_format: str = "auto"
    safetensors_load_strategy: str | None = None
    quantization: str = "none"
    quantize_head: bool = False
    dtype: str = "auto"
    device: str = "cpu"
    memory: str | int | None = None
    window: str | int | None = None
    max_model_len: int | None = None
    kernels: str = "default"
    threads: int | None = None
    reader: str = "process"
    check_weights: bool = False
    unwrap_names: bool = False
    revision: str | None = None

    def __post_init__(self) -> None:
        _one_of("--dtype", self.dtype, tuple(DTYPES))
        _one_of("--kernels", self.kernels, KERNELS)
        _one_of("--reader", self.reader, READERS)
        if self.safetensors_load_strategy is not None:
            _one_of("--safetensors-load-strategy", self.safetensors_load_strategy, STRATEGIES)
        try:
            scheme_by_name(self.quantization)
        except QuantError:
            _one_of("--quantization", self.quantization, tuple(scheme_names()))
        if self.quantize_head and self.quantization == "none":
            raise OptionError("--quantize-head needs a --quantization other than none")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise OptionError(f"--device {self.device}: known devices are cpu and cuda[:index]")
        _positive("--max-model-len", self.max_model_len)
        _positive("--threads", self.threads)
        for name, value in (("--memory", self.memory), ("--window", self.window)):
            if value is not None:
                parse_size(value, option=name)

    @property
    def memory_nbytes(self) -> int | None:
        """The memory limit in bytes."""
        return None if self.memory is None else parse_size(self.memory, option="--memory")

    @property
    def window_nbytes(self) -> int | None:
        """The look-ahead limit in bytes."""
        return None if self.window is None else parse_size(self.window, option="--window")


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise OptionError(f"{option} {value!r} is not known: choose one of {', '.join(known)}")


def _positive(option: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise OptionError(f"{option} {value!r}: a whole number of at least 1 is needed")

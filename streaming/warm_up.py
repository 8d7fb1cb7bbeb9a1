"""What torch and the kernels do only the first time they are used, done while nobody waits for it.

On a CPU that is thread pools and code generation (`warm_up`, before a load that is measured). On a GPU a kernel is
compiled when it first runs, half a second each: `DeviceWarmUp` runs one product of each kind that the model will ask
for, on small inputs, in a thread of its own while the load goes on, so that the forward pass finds them ready.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F

from layers.weights import LayerSpec, ParamSpec
from quant.dtypes import DType, to_torch
from quant.kernels import Kernels
from quant.panels import InOrder
from quant.scheme import Scheme, StoredSpec

logger = logging.getLogger(__name__)

# One number of tokens in each range that has kernels of its own (quant.triton.tiles): those of a prompt first, which is
# what the first pass computes, and then a single one.
TOKENS = (512, 64, 1, 32)
_ROWS, _ROW_MULTIPLE = 64, 16  # kernels tell sizes apart that are multiples of 16 from others


def warm_up() -> None:
    """Run each kind of kernel once on small inputs: thread pools and code generation are then behind us."""
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            x, weight = torch.zeros(8, 256, dtype=dtype), torch.zeros(256, 256, dtype=dtype)
            F.linear(x[:1], weight)
            F.linear(x, weight)
            heads = x.view(1, 4, 8, 64)
            F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


@dataclass(frozen=True)
class Trial:
    """One product: x [tokens, columns] of `dtype` times a weight in a scheme, of so many rows a section, and a bias."""

    scheme: Scheme
    sections: tuple[int, ...]
    columns: int
    bias: bool
    dtype: DType
    tokens: int


def trials_of(specs: Iterable[LayerSpec]) -> tuple[Trial, ...]:
    """One for each kind of product that kernels tell apart, all of them for one number of tokens and then for the next.
    Weights are as wide as the model's own, and a few rows high."""
    kinds = dict.fromkeys(kind for spec in specs for kind in _kinds(spec))
    return tuple(replace(kind, tokens=tokens) for tokens in TOKENS for kind in kinds)


def _kinds(spec: LayerSpec) -> Iterator[Trial]:
    names = {param.name for param in spec.params}
    for param in spec.params:
        if param.kind.has_scheme:
            bias = f"{param.name.rpartition('.')[0]}.bias" in names
            yield Trial(param.scheme, _few_rows(param), param.shape[1], bias, param.dtype, 0)


def _few_rows(param: ParamSpec) -> tuple[int, ...]:
    """Of a weight of one section or of several: a scale for all rows is another kernel's than one for some."""
    return tuple(_ROWS + rows % _ROW_MULTIPLE for rows in param.kept_rows[:2])


def run_trial(trial: Trial, *, device: torch.device, kernels: Kernels) -> torch.Tensor:
    """The product, [tokens, rows] of zeros or NaN."""
    dtype = to_torch(trial.dtype)
    specs = trial.scheme.storage(trial.sections, trial.columns, wide=trial.dtype)
    stored = {name: _zeros(spec, device) for name, spec in specs.items()}
    x = torch.zeros(trial.tokens, trial.columns, dtype=dtype, device=device)
    bias = torch.zeros(sum(trial.sections), dtype=dtype, device=device) if trial.bias else None
    return trial.scheme.linear(x, stored, trial.sections, bias, kernels=kernels)


def _zeros(spec: StoredSpec, device: torch.device) -> torch.Tensor:
    """Of any dtype: not all can be filled."""
    found = torch.zeros(prod(spec.shape) * spec.dtype.itemsize, dtype=torch.uint8, device=device)
    return found.view(to_torch(spec.dtype)).view(spec.shape)


class DeviceWarmUp:
    """The trials, one after the other in a thread of its own. A failure is left for the forward pass to meet, which
    says where."""

    def __init__(self, trials: Sequence[Trial], *, device: torch.device, kernels: Kernels) -> None:
        self._trials, self._device = trials, device
        self._kernels = replace(kernels, run=InOrder())  # panels serve one caller at a time: the forward pass
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="firstlayer-warm-up", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with torch.inference_mode():
            for trial in self._trials:
                if self._stopped.is_set():
                    return
                try:
                    run_trial(trial, device=self._device, kernels=self._kernels)
                except Exception:
                    logger.debug("%s for %d tokens could not be warmed up", trial.scheme.name, trial.tokens)

    def close(self) -> None:
        """Begin no further trial, and wait for the thread."""
        self._stopped.set()
        self._thread.join()


def warm_up_device(
    device_name: str, specs: Iterable[LayerSpec], *, device: torch.device, kernels: Kernels
) -> DeviceWarmUp | None:
    """Begin to warm up what `specs` need on the device of this name; None for a CPU, whose kernels are compiled."""
    if device_name == "cpu":
        return None
    return DeviceWarmUp(trials_of(specs), device=device, kernels=kernels)

"""Times every product of a stored weight on a device against strips of wide numbers, and says how far each is off."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from examples.gpu_measure import Gpu
from quant.dtypes import DType, to_torch
from quant.int4 import IntPerGroup
from quant.kernels import KernelMode, Kernels
from quant.packed import pack
from quant.registry import scheme_by_name, scheme_names
from quant.scheme import Scheme

VARIANTS = ("int4_per_group:128:asym",)  # beside every scheme by its plain name
TOKENS = (1, 8, 32, 512)
SHAPE = (14336, 4096)  # outputs and inputs of a large MLP
COLD_NBYTES = 256 << 20  # of copies of a weight, taken in turn: more than any cache holds
CALLS, ROUNDS = 20, 5
ROUNDED = ("fp8_per_tensor", "fp8_per_channel")  # whose activations --kernels fast rounds to e4m3
TILED = ("int4_per_group", *VARIANTS)  # whose weights it has a second time in the tiles of torch's int4 product
LIMITS = {KernelMode.DEFAULT: 0.01, KernelMode.FAST: 0.05}  # of the error: bfloat16's own, and that of e4m3 activations


@dataclass(frozen=True)
class Timed:
    """One product: seconds of a call (host included) and of strips; error: root mean square, relative to the result."""

    scheme: str
    mode: KernelMode
    tokens: int
    first_call_s: float
    call_s: float
    strips_s: float
    nbytes: int
    error: float
    repeats: bool

    @property
    def holds(self) -> bool:
        """Near enough to the float32 product, and the same bits twice."""
        return self.repeats and self.error <= LIMITS[self.mode]


def time_kernels(
    gpu: Gpu, *, shape: tuple[int, int] = SHAPE, tokens: Sequence[int] = TOKENS, calls: int = CALLS
) -> list[Timed]:
    """All schemes; those with a product of rounded activations or of packed copies with that too."""
    found = []
    for name in (*scheme_names(), *VARIANTS):
        if name != "none":
            modes = (KernelMode.DEFAULT, KernelMode.FAST) if name in (*ROUNDED, *TILED) else (KernelMode.DEFAULT,)
            found += _time_scheme(name, modes, gpu, shape, tokens, calls)
    return found


def _time_scheme(
    name: str, modes: Sequence[KernelMode], gpu: Gpu, shape: tuple[int, int], tokens: Sequence[int], calls: int
) -> list[Timed]:
    scheme, generator = scheme_by_name(name), torch.Generator(device=gpu.device).manual_seed(0)
    weight = torch.randn(shape, generator=generator, device=gpu.device).div_(math.sqrt(shape[1])).bfloat16()
    copies = _Copies(scheme, _stored(scheme, weight), shape[0], gpu)
    wide = scheme.dequantize(copies.stored[0], shape[:1], dtype=torch.float32, in_features=shape[1])
    found = []
    for rows in tokens:
        x = torch.randn(rows, shape[1], generator=generator, device=gpu.device).bfloat16()
        expected = x.double() @ wide.double().t()
        strips_s = copies.seconds(x, Kernels.detect(mode=KernelMode.EXACT), calls)
        found += [_timed(name, mode, copies, x, expected, strips_s, calls) for mode in modes]
    return found


def _timed(
    name: str, mode: KernelMode, copies: _Copies, x: torch.Tensor, expected: torch.Tensor, strips_s: float, calls: int
) -> Timed:
    kernels = Kernels.detect(mode=mode)
    begin = time.perf_counter()
    out = copies.product(x, 0, kernels)
    copies.gpu.synchronize()  # whatever compiles does so in the first call
    first_call_s = time.perf_counter() - begin
    return Timed(
        name, mode, x.shape[0], first_call_s,
        call_s=copies.seconds(x, kernels, calls),
        strips_s=strips_s,
        nbytes=copies.nbytes,
        error=float((out.double() - expected).norm() / expected.norm()),
        repeats=torch.equal(out, copies.product(x, 0, kernels)),
    )  # fmt: skip


class _Copies:
    """A stored weight several times over, so that no product finds it in a cache."""

    def __init__(self, scheme: Scheme, stored: dict[str, torch.Tensor], rows: int, gpu: Gpu) -> None:
        self.scheme, self.sections, self.gpu = scheme, (rows,), gpu
        self.nbytes = sum(tensor.nbytes for tensor in stored.values())
        more = COLD_NBYTES // self.nbytes if gpu.is_cuda else 0
        self.stored = [stored, *({key: tensor.clone() for key, tensor in stored.items()} for _ in range(more))]
        weights = [(scheme, one) for one in self.stored] if isinstance(scheme, IntPerGroup) else []
        self.packed = pack(weights, kernels=Kernels.detect(mode=KernelMode.FAST))

    def product(self, x: torch.Tensor, index: int, kernels: Kernels) -> torch.Tensor:
        """x times copy number `index`: the packed one where there is one and it takes x."""
        stored = self.stored[index % len(self.stored)]
        packed = self.packed[index % len(self.packed)] if self.packed and kernels.mode is KernelMode.FAST else None
        if packed is not None and (out := packed.linear(x, None)) is not None:
            return out
        return self.scheme.linear(x, stored, self.sections, None, kernels=kernels)

    def seconds(self, x: torch.Tensor, kernels: Kernels, calls: int) -> float:
        """Of one call among many: the median of several rounds behind one that warms up."""
        rounds = []
        for _ in range(1 + ROUNDS):
            self.gpu.synchronize()
            begin = time.perf_counter()
            for index in range(calls):
                self.product(x, index, kernels)
            self.gpu.synchronize()
            rounds.append((time.perf_counter() - begin) / calls)
        return statistics.median(rounds[1:])


def _stored(scheme: Scheme, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    sections = (weight.shape[0],)
    specs = scheme.storage(sections, weight.shape[1], wide=DType.BF16)
    stored = {
        key: torch.empty(spec.shape, dtype=to_torch(spec.dtype), device=weight.device) for key, spec in specs.items()
    }
    scheme.quantize_into(weight, scheme.section_views(stored, sections, 0))
    return stored


def kernel_table(timed: Sequence[Timed]) -> str:
    """Markdown. GB/s: bytes of the stored weight over the time of a call."""
    lines = [
        "| scheme | kernels | tokens | first call ms | call us | strips us | times | GB/s | error | holds |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in timed:
        figures = (
            f"{row.first_call_s * 1e3:.0f}", f"{row.call_s * 1e6:.0f}", f"{row.strips_s * 1e6:.0f}",
            f"{row.strips_s / row.call_s:.2f}", f"{row.nbytes / row.call_s / 1e9:.0f}", f"{row.error:.1e}",
        )  # fmt: skip
        holds = "yes" if row.holds else "NO"
        lines.append(f"| {row.scheme} | {row.mode.value} | {row.tokens} | {' | '.join(figures)} | {holds} |")
    return "\n".join(lines) + "\n"

"""How fast each matmul and each quantizer is on this CPU, as Markdown tables: what quant.kernels was decided by.

    python examples/bench_kernels.py --quick
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 python examples/bench_kernels.py

Runs of all paths are interleaved and the median is shown, so that a busy machine slows all of them alike.
Kernels run their panels in order here, in one thread; the runtime may hand them to several.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F

from quant.dtypes import DType, to_torch
from quant.kernels import KernelMode, Kernels
from quant.registry import scheme_by_name, scheme_names

INT8_MULTIPLE = 16  # torch's int8 product reads past rows of other lengths
Call = Callable[[], object]


def main() -> None:
    """Print the tables."""
    options = _options()
    torch.manual_seed(0)
    shapes = [_shape(text) for text in options.shapes]
    print(f"CPU capability {torch.backends.cpu.get_cpu_capability()}, {Kernels.detect().features}, ", end="")
    print(f"torch {torch.__version__}, {options.threads} threads where not said otherwise\n")
    with torch.inference_mode():
        for rows_out, columns in shapes:
            _print_products(rows_out, columns, options)
        _print_quantizers(shapes[0], options)


def _shape(text: str) -> tuple[int, int]:
    rows_out, columns = text.split("x")
    return int(rows_out), int(columns)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["8192x2048", "2048x8192", "2560x9728"], metavar="OxI")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 512])
    parser.add_argument("--repeats", type=int, default=9, help="runs of each path (default %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="for products (default: all)")
    parser.add_argument("--quick", action="store_true", help="one shape, rows 1 and 32, 3 repeats")
    options = parser.parse_args()
    if options.quick:
        options.shapes, options.rows, options.repeats = options.shapes[:1], [1, 32], 3
    return options


def _print_products(rows_out: int, columns: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    weight = torch.randn(rows_out, columns, dtype=torch.bfloat16)
    stored = {name: _quantized(name, weight) for name in scheme_names()}
    table: dict[str, list[float]] = {}
    for rows in options.rows:
        calls = _products(torch.randn(rows, columns, dtype=torch.bfloat16), weight, stored)
        for name, seconds in _interleaved(calls, options.repeats).items():
            table.setdefault(name, []).append(seconds)
    print(f"Weight {rows_out} x {columns}, microseconds\n")
    print("| path | " + " | ".join(f"{rows} rows" for rows in options.rows) + " |")
    print("|---" * (len(options.rows) + 1) + "|")
    for name, seconds_by_rows in table.items():
        print(f"| {name} | " + " | ".join(f"{seconds * 1e6:.0f}" for seconds in seconds_by_rows) + " |")
    print()


def _products(
    x: torch.Tensor, weight: torch.Tensor, stored: Mapping[str, Mapping[str, torch.Tensor]]
) -> dict[str, Call]:
    sections = (weight.shape[0],)
    calls: dict[str, Call] = {"bf16 `F.linear`, bits depend on threads": lambda: F.linear(x, weight)}
    calls["bf16 `torch.mv`, first row only"] = lambda: torch.mv(weight, x[0])
    single, single_x = weight.float(), x.float()
    calls["fp32 `F.linear`, bits depend on threads"] = lambda: F.linear(single_x, single)
    codes = stored["int8_per_channel"]["weight"]
    if codes.shape[1] % INT8_MULTIPLE == 0:
        ones = torch.ones(codes.shape[0], dtype=x.dtype)
        calls["`_weight_int8pack_mm`"] = lambda: torch._weight_int8pack_mm(x, codes, ones)
    for mode in (KernelMode.DEFAULT, KernelMode.EXACT):
        kernels = Kernels.detect(mode=mode)
        for name, tensors in stored.items():
            linear = scheme_by_name(name).linear
            linear = partial(scheme_by_name(name).linear, x, tensors, sections, None, kernels=kernels)
            calls[f"Kernels {mode.value}, {name}, one thread"] = linear
    return calls


def _quantized(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scheme = scheme_by_name(name)
    specs = scheme.storage((weight.shape[0],), weight.shape[1], wide=DType.BF16)
    stored = {key: torch.empty(spec.shape, dtype=to_torch(spec.dtype)) for key, spec in specs.items()}
    scheme.quantize_into(weight, stored)
    return stored


def _print_quantizers(shape: tuple[int, int], options: argparse.Namespace) -> None:
    rows_out, columns = shape
    weight = torch.randn(rows_out, columns, dtype=torch.bfloat16)
    copy = torch.empty_like(weight)
    calls: dict[str, Call] = {"memory copy": lambda: copy.copy_(weight)}
    for name in scheme_names():
        if name != "none":
            calls[name] = partial(scheme_by_name(name).quantize_into, weight, _quantized(name, weight))
    rates = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        times = _interleaved(calls, options.repeats)
        rates.append({name: weight.nbytes / seconds / 1e9 for name, seconds in times.items()})
    print(f"Quantizing {rows_out} x {columns}, GB/s of bf16 read\n")
    print("| scheme | 1 thread | 2 threads |\n|---|---|---|")
    for name in calls:
        print(f"| {name} | {rates[0][name]:.2f} | {rates[1][name]:.2f} |")


def _interleaved(calls: Mapping[str, Call], repeats: int) -> dict[str, float]:
    """The median seconds of each call; all take turns, after one run of each that is not counted."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    main()

"""How long the matmuls of every path take, and how fast weights are quantized: the table behind quant.kernels' choices.

usage: python examples/bench_kernels.py [--quick] [--shapes 8192x2048,...] [--rows 1,8,32,512] [--threads 1,2]

Prints Markdown. Every time is the median of interleaved runs, in microseconds: the paths take turns, so that what else
the machine does is spread over all of them. Raw operators run on torch's own threads; "chosen" is what Kernels does for
a scheme, on a pool of panels. A path that torch does not have here, or that would take minutes, is left blank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F

from quant.cpu_features import CpuFeatures
from quant.dtypes import DType, to_torch
from quant.kernels import KernelMode, Kernels
from quant.packed import pack
from quant.percentile import takes_percentile, with_percentile
from quant.registry import scheme_by_name, scheme_names
from quant.scheme import Scheme
from streaming.panel_pool import PanelPool

Run = Callable[[], object]
Stored = dict[str, torch.Tensor]

SHAPES = ((8192, 2048), (2048, 8192), (9728, 2560))
ROWS = (1, 8, 32, 512)
QUANTIZED = tuple(name for name in scheme_names() if name != "none")
PERCENTILE = 99.9
CLIPPED = tuple(f"{name}, percentile {PERCENTILE}" for name in QUANTIZED if takes_percentile(scheme_by_name(name)))
LARGEST_PACKED_ROWS = 64  # torch's int8 product is far behind for more


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Times of matmuls and of quantization, as Markdown.")
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few runs, to see that it works")
    parser.add_argument("--shapes", type=_shapes, metavar="OxI,OxI")
    parser.add_argument("--rows", type=_numbers, metavar="N,N")
    parser.add_argument("--threads", type=_numbers, default=(1, 2), metavar="N,N")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="most to spend on one line of the table (3 runs at least)"
    )
    options = parser.parse_args(arguments)
    shapes = options.shapes or (((256, 128), (128, 256)) if options.quick else SHAPES)
    rows = options.rows or ((1, 8) if options.quick else ROWS)
    seconds = 0.02 if options.quick else options.seconds
    print(capability_line())
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
        print_products(shapes, rows, options.threads, seconds=seconds)
        print_quantization(shapes, options.threads, seconds=seconds)


def capability_line() -> str:
    """What torch may use of this CPU."""
    features = CpuFeatures.detect()
    limits = [f"{name}={os.environ[name]}" for name in _LIMITS if name in os.environ]
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, native bfloat16 "
        f"{features.native_bf16}, VNNI {features.vnni}, {os.cpu_count()} cores{load}"
        f"{', ' if limits else ''}{' '.join(limits)}"
    )


_LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


# --- products -------------------------------------------------------------------------------------------------------


def print_products(
    shapes: Sequence[tuple[int, int]], rows: Sequence[int], threads: Sequence[int], *, seconds: float
) -> None:
    """A table for each number of threads: a line for each path, a column for each shape and number of rows."""
    for count in threads:
        columns = {f"{o}x{i}, {n} rows": times_of((o, i), n, count, seconds=seconds) for o, i in shapes for n in rows}
        print(f"\n## Products, {count} thread{'s' if count > 1 else ''}: microseconds\n")
        print("| path | " + " | ".join(columns) + " |")
        print("| --- |" + " ---: |" * len(columns))
        for path in dict.fromkeys(path for column in columns.values() for path in column):
            cells = (f"{column[path]:.0f}" if path in column else "" for column in columns.values())
            print(f"| {path} | " + " | ".join(cells) + " |")


def times_of(shape: tuple[int, int], rows: int, threads: int, *, seconds: float) -> dict[str, float]:
    """Median microseconds of every path that runs here."""
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).mul_(0.05).bfloat16()
    x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    with own_threads(threads), panel_pool(threads) as pool:
        runs = {**raw_runs(weight, x), **chosen_runs(weight, x, pool)}
        return medians({name: run for name, run in runs.items() if _works(run)}, seconds=seconds)


def raw_runs(weight: torch.Tensor, x: torch.Tensor) -> dict[str, Run]:
    """The operators themselves, without panels."""
    single, x32, ones = weight.float(), x.float(), torch.ones(weight.shape[0], dtype=x.dtype)
    int8, float8 = _stored("int8_per_channel", weight), _stored("fp8_per_tensor", weight)
    half, one = torch.ops.quantized.linear_prepack_fp16(single, None), torch.ones(())
    scales = int8["weight_scale"].double()
    per_channel = torch._make_per_channel_quantized_tensor(int8["weight"], scales, torch.zeros_like(scales).long(), 0)
    packed = torch.ops.quantized.linear_prepack(per_channel, None)
    x8, codes = x.to(torch.float8_e4m3fn), float8["weight"].t()
    runs: dict[str, Run] = {
        "bf16 F.linear": lambda: F.linear(x, weight),
        "fp32 F.linear": lambda: F.linear(x32, single),
        "fbgemm int8": lambda: torch.ops.quantized.linear_dynamic(x32, packed, True),
        "fbgemm fp16": lambda: torch.ops.quantized.linear_dynamic_fp16(x32, half),
    }
    if x.shape[0] == 1:  # for more, torch._scaled_mm takes seconds on a CPU
        runs["fp8 torch._scaled_mm"] = lambda: torch._scaled_mm(x8, codes, scale_a=one, scale_b=one, out_dtype=x.dtype)
        runs["bf16 torch.mv"] = lambda: torch.mv(weight, x[0])
    if x.shape[0] <= LARGEST_PACKED_ROWS:
        runs["int8pack"] = lambda: torch._weight_int8pack_mm(x, int8["weight"], ones)
    return runs


def chosen_runs(weight: torch.Tensor, x: torch.Tensor, pool: PanelPool) -> Mapping[str, Run]:
    """What Kernels does for each scheme, and the same where there are no bfloat16 instructions, or for a reference."""
    sections, kernels = (weight.shape[0],), Kernels.detect(run=pool)
    strips, exact = Kernels(run=pool), Kernels(KernelMode.EXACT, run=pool)
    runs: dict[str, Run] = {}

    def add(path: str, name: str, stored: Stored, kernels: Kernels) -> None:
        scheme = scheme_by_name(name)
        runs[path] = lambda: scheme.linear(x, stored, sections, None, kernels=kernels)

    for name in scheme_names():
        stored = _stored(name, weight)
        add(f"{name}, chosen", name, stored, kernels)
        if kernels.features.native_bf16:
            add(f"{name}, chosen without bf16 instructions", name, stored, strips)
        add(f"{name}, exact", name, stored, exact)
        (packed,) = pack([(scheme_by_name(name), stored)], kernels=kernels)
        if packed is not None and packed.linear(x, None) is not None:
            runs[f"{name}, fast"] = partial(packed.linear, x, None)
    return runs


def _works(run: Run) -> bool:
    try:
        run()
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    return True


# --- quantization ---------------------------------------------------------------------------------------------------


def print_quantization(shapes: Sequence[tuple[int, int]], threads: Sequence[int], *, seconds: float) -> None:
    """GB/s of bfloat16 that go in, each thread working on a weight of its own, and the rate of a plain copy (which
    writes as many bytes as it reads); schemes with a percentile after those without."""
    columns = {
        f"{rows}x{columns}, {count} thread{'s' if count > 1 else ''}": rates_of((rows, columns), count, seconds=seconds)
        for rows, columns in shapes
        for count in threads
    }
    print("\n## Quantization: GB/s of bfloat16 read\n")
    print("| scheme | " + " | ".join(columns) + " |")
    print("| --- |" + " ---: |" * len(columns))
    for name in ("none", *QUANTIZED, *CLIPPED):
        label = "memory copy (none)" if name == "none" else name
        print(f"| {label} | " + " | ".join(f"{column[name]:.3g}" for column in columns.values()) + " |")


def rates_of(shape: tuple[int, int], count: int, *, seconds: float) -> dict[str, float]:
    """GB/s of each scheme, so many threads at once, the schemes taking turns."""
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    schemes = {name: scheme_by_name(name) for name in ("none", *QUANTIZED)}
    schemes |= {name: with_percentile(schemes[name.split(",")[0]], PERCENTILE) for name in CLIPPED}
    runs = {name: _on_threads(count, _quantizer(scheme, weight, count)) for name, scheme in schemes.items()}
    with own_threads(1):
        found = medians(runs, seconds=seconds)
    return {name: count * weight.nbytes / time_us / 1e3 for name, time_us in found.items()}


def _quantizer(scheme: Scheme, weight: torch.Tensor, count: int) -> Callable[[int], None]:
    weights, outs = [weight.clone() for _ in range(count)], [_kept(scheme, weight) for _ in range(count)]
    return lambda index: scheme.quantize_into(weights[index], outs[index])


def _on_threads(count: int, work: Callable[[int], None]) -> Run:
    def on_one(index: int) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode():
            work(index)

    def run() -> None:
        threads = [threading.Thread(target=on_one, args=(index,)) for index in range(1, count)]
        for thread in threads:
            thread.start()
        work(0)
        for thread in threads:
            thread.join()

    return run


# --- measuring ------------------------------------------------------------------------------------------------------


def medians(runs: Mapping[str, Run], *, seconds: float) -> dict[str, float]:
    """Median microseconds of each, the runs taking turns: one round to get warm, then 3 to 25 in about that time."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    begun = time.perf_counter()
    for rounds in range(25):
        if rounds >= 3 and time.perf_counter() - begun > seconds:
            break
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(found) for name, found in times.items()}


@contextmanager
def own_threads(count: int) -> Iterator[None]:
    """torch's own threads for the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def panel_pool(threads: int) -> Iterator[PanelPool]:
    """A pool that ends with the block."""
    pool = PanelPool(threads)
    try:
        yield pool
    finally:
        pool.close()


def _stored(name: str, weight: torch.Tensor) -> Stored:
    return _kept(scheme_by_name(name), weight)


def _kept(scheme: Scheme, weight: torch.Tensor) -> Stored:
    sections = (weight.shape[0],)
    specs = scheme.storage(sections, weight.shape[1], wide=DType.BF16)
    stored = {key: torch.empty(spec.shape, dtype=to_torch(spec.dtype)) for key, spec in specs.items()}
    scheme.quantize_into(weight, stored)
    return stored


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    pairs = (shape.split("x") for shape in text.split(","))
    return tuple((int(rows), int(columns)) for rows, columns in pairs)


if __name__ == "__main__":
    main()

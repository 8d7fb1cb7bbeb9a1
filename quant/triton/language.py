"""The one file that imports Triton: its language under the name `tl`, how a kernel is declared, and where it runs.

With TRITON_INTERPRET=1 in the environment when this is first imported, kernels run in Triton's interpreter, on a CPU.
Its products of bfloat16 multiply the bits as if they were integers, so tiles are widened to float32 for it: the same
numbers, since every product of two such numbers is exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from quant.errors import QuantError

__all__ = ["INTERPRETED", "device_function", "kernel", "launch", "product_dtype", "tl"]

INTERPRETED = bool(triton.knobs.runtime.interpret)


def kernel(function: Callable[..., None]) -> Any:
    """A function of `tl` as a kernel. One compiled form serves every number of tokens with the same tiles, and every
    weight of a scheme whose sizes are multiples of 16: compiling takes half a second."""
    return triton.jit(function, do_not_specialize=["tokens", "scale_columns", "groups", "blocks", "row_scale_step"])


def device_function(function: Callable[..., Any]) -> Any:
    """A function of `tl` that kernels call."""
    return triton.jit(function)


def product_dtype(dtype: torch.dtype) -> Any:
    """What tiles are multiplied in where activations have this dtype; sums are float32 in any case."""
    exact = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return tl.float32 if INTERPRETED else exact.get(dtype, tl.float32)


def launch(
    function: Any,
    grid: tuple[int, ...],
    *arguments: torch.Tensor | int | None,
    device: torch.device,
    warps: int,
    stages: int,
    constants: dict[str, Any],
) -> None:
    """Run a kernel on the tensors' device, whichever is the thread's current one, on its current stream.

    Raises QuantError where Triton cannot build its launcher.
    """
    if device.type == "cpu":
        function[grid](*arguments, **constants)
        return
    try:
        with torch.accelerator.device_index(device.index):
            function[grid](*arguments, **constants, num_warps=warps, num_stages=stages)
    except RuntimeError as error:
        if "C compiler" not in str(error):  # Triton builds a launcher of its own, once, when it first runs
            raise
        raise QuantError(
            "Triton finds no C compiler for its launcher: install gcc or clang, or name one in CC; "
            "--kernels exact runs without Triton"
        ) from error

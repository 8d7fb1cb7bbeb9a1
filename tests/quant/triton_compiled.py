"""Compiles every Triton kernel for real GPUs, which needs none: prints {"what": shared memory in bytes} as JSON.

usage: python -m tests.quant.triton_compiled CAPABILITY:TOKENS...   (such as 80:1 90:512)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quant.triton.float4 import float4_kernel
from quant.triton.float8 import float8_kernel
from quant.triton.integers import integers_kernel
from quant.triton.language import tl
from quant.triton.tiles import WHOLE_ROW, ScaleForm, Tiles, tiles_for

POINTERS = {"x": "*bf16", "bias": "*bf16", "out": "*bf16", "weight": "*u8", "row_scale": "*fp32", "zeros": "*u8"}
DIVISIBLE = ("inputs", "outputs", "row_nbytes")  # by 16: what lets the compiler use wide loads


def variants(capability: int, tokens: int) -> Iterator[tuple[str, Any, Mapping[str, str], Mapping[str, Any], Tiles]]:
    """Every kernel with what it is called with."""
    native = capability >= 89
    for name, columns, form, scale in (
        ("fp8 blocks", 128, ScaleForm.FLOAT, "*fp32"), ("fp8 rows", WHOLE_ROW, ScaleForm.FLOAT, "*fp32"),
        ("mxfp8", 32, ScaleForm.E8M0, "*u8"),
    ):  # fmt: skip
        types = {"weight": "*fp8e4nv" if native else "*u8", "scale": scale}
        tiles = tiles_for(tokens, bits=8, columns_per_scale=columns)
        yield name, float8_kernel, types, {"form": int(form), "native": native}, tiles
    for name, bits, columns, symmetric in (
        ("int4", 4, 32, True), ("int4 asymmetric", 4, 128, False), ("int4 48", 4, 48, True), ("int8", 8, 0, True),
    ):  # fmt: skip
        tiles = tiles_for(tokens, bits=bits, columns_per_scale=columns)
        constants = {"bits": bits, "middle": 8 if bits == 4 else 0, **({"zeros": None} if symmetric else {})}
        yield name, integers_kernel, {"scale": "*bf16"}, constants, tiles
    for name, block, form, rows in (("mxfp4", 32, ScaleForm.E8M0, False), ("nvfp4", 16, ScaleForm.E4M3, True)):
        tiles = tiles_for(tokens, bits=4, columns_per_scale=block)
        constants = {"form": int(form), "block": block, **({} if rows else {"row_scale": None})}
        yield name, float4_kernel, {"scale": "*u8"}, constants, tiles


def compiled(kernel: Any, types: Mapping[str, str], constants: Mapping[str, Any], tiles: Tiles, capability: int) -> Any:
    """The kernel's binary for a GPU of this capability."""
    known = {**constants, **tiles.constants(), "product": tl.bfloat16}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in known else types.get(name, POINTERS.get(name, "i32")) for name in names}
    aligned = [name for name in names if signature[name].startswith("*") or name in DIVISIBLE]
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in known.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )  # fmt: skip
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main() -> None:
    """The command line."""
    found = {}
    for argument in sys.argv[1:]:
        capability, tokens = map(int, argument.split(":"))
        for name, kernel, types, constants, tiles in variants(capability, tokens):
            binary = compiled(kernel, types, constants, tiles, capability)
            found[f"{argument} {name}"] = binary.metadata.shared
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()

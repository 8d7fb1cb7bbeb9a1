"""bitsandbytes on disk: nf4 and fp4 (codes, a scale for each block, which may be quantized once more), and int8.

4 bits: `weight` uint8 [numel / 2, 1], `weight.absmax` with a scale for each block of the weight, row after row,
`weight.quant_map` with the 16 numbers of the codes, and `weight.quant_state.bitsandbytes__nf4`, a JSON text. Quantized
once more: absmax is uint8 and stands for nested_quant_map[absmax] * nested_absmax[its block] + nested_offset, which is
in the JSON text.
8 bits: `weight` int8 [O, I] and `SCB`, the magnitudes of the rows: SCB / 127 is the scale.

Names with two dots stand for one leaf each: `LEAVES`. How large blocks are follows from the number of scales.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, prod
from typing import TYPE_CHECKING, Any

from quant.disk_forms.form import DiskForm, DiskTensor, FoundTensor
from quant.disk_forms.settings import ignored_modules
from quant.dtypes import DType
from quant.errors import QuantError
from quant.int8 import Int8PerChannel
from quant.module_patterns import any_matches
from quant.nf4 import NUMBERS, Nf4
from quant.scheme import Scheme

if TYPE_CHECKING:
    import torch

# What a name ends with on disk, behind the module's -> as the leaf that it is read as.
LEAVES: Mapping[str, str] = {
    "weight.absmax": "weight_absmax",
    "weight.quant_map": "weight_quant_map",
    "weight.nested_absmax": "weight_nested_absmax",
    "weight.nested_quant_map": "weight_nested_quant_map",
    **{f"weight.quant_state.bitsandbytes__{kind}": f"weight_quant_state_{kind}" for kind in NUMBERS},
}
_BLOCKS = tuple(1 << exponent for exponent in range(5, 13))  # 32 to 4096
_LONGEST_STATE = 4096  # bytes of the JSON text; it has some 170


@dataclass(frozen=True)
class FourBits:
    """`nested`: the size of a block of scales that share a scale of their own, 0 where scales are float32."""

    kept: Nf4
    nested: int = 0

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"bitsandbytes {self.kept.numbers} in blocks of {self.kept.block}"

    def tensors(self, rows: int, in_features: int) -> tuple[DiskTensor, ...]:
        """What scales are made of, in the order of the arithmetic; then codes."""
        numel = rows * in_features
        blocks = -(-numel // self.kept.block)
        dtype = DType.U8 if self.nested else DType.F32
        scales = [DiskTensor("weight_absmax", ((blocks,),), (dtype,), "weight_scale")]
        if self.nested:
            groups = (-(-blocks // self.nested),)
            scales += [
                DiskTensor("weight_nested_quant_map", ((256,),), (DType.F32,), "weight_scale"),
                DiskTensor("weight_nested_absmax", (groups,), (DType.F32,), "weight_scale"),
            ]
        sizes = tuple((size,) for size in range(1, _LONGEST_STATE))
        return (
            DiskTensor("weight_quant_map", ((16,),), (DType.F32,), "weight_scale"),
            *scales,
            DiskTensor(self._state, sizes, (DType.U8,), "weight_scale"),
            DiskTensor("weight", _packed(rows, in_features), (DType.U8,), "weight", as_is=True),
        )

    @property
    def _state(self) -> str:
        return f"weight_quant_state_{self.kept.numbers}"

    def place(self, leaf: str, tensor: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """Each step of scale = nested_quant_map[absmax] * nested_absmax + offset, in float32; codes as they are.

        QuantError where the numbers of the codes are others, or the JSON text says something else than the shapes.
        """
        if leaf == "weight":
            out["weight"].copy_(tensor.reshape(out["weight"].shape))
        elif leaf == "weight_quant_map":
            _check_numbers(tensor, self.kept.numbers)
        elif leaf == self._state:
            self._finish(tensor, out)
        else:
            self._scale(leaf, tensor, out)

    def _scale(self, leaf: str, tensor: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        scale = out["weight_scale"].view(-1)
        used = scale[: -(-2 * out["weight"].numel() // self.kept.block)]
        if leaf == "weight_absmax":
            scale.zero_()  # behind the last block, up to whole rows of scales
            used.copy_(tensor)  # codes up to 255 are exact
        elif leaf == "weight_nested_quant_map":
            used.copy_(tensor.index_select(0, used.int()))
        else:
            used.mul_(tensor.repeat_interleave(self.nested)[: used.numel()])

    def _finish(self, tensor: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        state = _parsed(bytes(tensor.tolist()))
        rows, columns = out["weight"].shape
        wanted = {"quant_type": self.kept.numbers, "shape": [rows, 2 * columns]}
        for key, value in wanted.items():
            if state.get(key) != value:
                raise QuantError(f"its quant_state says {key} {str(state.get(key))[:60]}, not {value}")
        _check_block("blocksize", state, self.kept.block, count=rows * 2 * columns)
        if self.nested:
            blocks = -(-2 * out["weight"].numel() // self.kept.block)
            _check_block("nested_blocksize", state, self.nested, count=blocks)
            offset = state.get("nested_offset")
            if not isinstance(offset, int | float) or not isfinite(offset):
                raise QuantError(f"its quant_state says nested_offset {str(offset)[:60]}, not a number")
            out["weight_scale"].view(-1)[:blocks].add_(offset)


@dataclass(frozen=True)
class EightBits:
    """Rows of int8 codes with their magnitudes."""

    name: str = "bitsandbytes int8"

    @property
    def kept(self) -> Scheme:
        """A scale for each row."""
        return Int8PerChannel()

    def tensors(self, rows: int, in_features: int) -> tuple[DiskTensor, ...]:
        """Magnitudes, then codes."""
        note = "how codes lie in memory, which the file does not depend on"
        return (
            DiskTensor("weight_format", ((),), (DType.U8,), optional=True, unused=note),
            DiskTensor("SCB", ((rows,),), (DType.F32,), "weight_scale"),
            DiskTensor("weight", ((rows, in_features),), (DType.I8,), "weight", as_is=True),
        )

    def place(self, leaf: str, tensor: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """scale = SCB / 127."""
        if leaf == "SCB":
            out["weight_scale"].copy_(tensor).div_(127)
        else:
            out["weight"].copy_(tensor)


@dataclass(frozen=True)
class BitsAndBytesMethod:
    """`ignore`: names of modules that stay wide."""

    ignore: tuple[str, ...] = ()
    name: str = "bitsandbytes"

    @property
    def leaves(self) -> Mapping[str, str]:
        """What names end with on disk -> as the leaf that it is read as."""
        return LEAVES

    def form_of(self, module: str, found: Mapping[str, FoundTensor], shape: tuple[int, int]) -> DiskForm | None:
        """What the tensors show."""
        weight = found.get("weight")
        if weight is not None and weight.dtype.is_wide and "weight_absmax" in found:
            stored = f"{weight.dtype.value} (bnb_4bit_quant_storage)"
            raise QuantError(f"its 4-bit codes are stored as {stored}; as U8 they can be read")
        if weight is None or weight.dtype.is_wide:
            return None
        if weight.dtype is DType.I8:
            if "SCB" not in found:
                raise QuantError("its weight is int8, but it has no magnitudes of its rows (SCB)")
            return EightBits()
        if weight.dtype is not DType.U8:
            raise QuantError(f"weight is {weight.dtype.value}, but bitsandbytes' codes are U8 (4 bits) or I8")
        kind = next((kind for kind in NUMBERS if f"weight_quant_state_{kind}" in found), None)
        if kind is None or "weight_absmax" not in found:
            missing = "weight.absmax" if kind else "weight.quant_state.bitsandbytes__nf4"
            raise QuantError(f"its weight is U8, but it has no {missing}")
        return _four_bits(kind, found, shape)

    def excludes(self, module: str) -> bool:
        """By the configuration's list."""
        return any_matches(self.ignore, module)


def bitsandbytes_method(config: Mapping[str, Any]) -> BitsAndBytesMethod:
    """The method of a quantization_config. Raises QuantError for what cannot be read."""
    kind = config.get("bnb_4bit_quant_type", "nf4")
    if kind not in NUMBERS:
        raise QuantError(f"bnb_4bit_quant_type {str(kind)[:60]!r}: {', '.join(NUMBERS)} can be read")
    return BitsAndBytesMethod(ignored_modules(config, "llm_int8_skip_modules", "modules_to_not_convert"))


def _four_bits(kind: str, found: Mapping[str, FoundTensor], shape: tuple[int, int]) -> FourBits:
    absmax, numel = found["weight_absmax"], prod(shape)
    if found["weight"].shape not in _packed(*shape):
        raise QuantError(f"weight has shape {list(found['weight'].shape)}, but {numel} codes are {[numel // 2, 1]}")
    scales = prod(absmax.shape)
    block = _block_of(numel, scales)
    if block is None:
        raise QuantError(f"{scales} scales (weight.absmax) are none for blocks of 32 to 4096 of {numel} numbers")
    kept = Nf4.of(kind, block=block, in_features=shape[1])
    if absmax.dtype is not DType.U8:
        return FourBits(kept)
    if "weight_nested_absmax" not in found:
        raise QuantError("its scales (weight.absmax) are U8, but it has no weight.nested_absmax")
    groups = prod(found["weight_nested_absmax"].shape)
    nested = _block_of(scales, groups)
    if nested is None:
        raise QuantError(f"{groups} scales (weight.nested_absmax) are none for blocks of {scales} scales")
    return FourBits(kept, nested)


def _block_of(count: int, blocks: int) -> int | None:
    """The size of blocks of which so many hold so many numbers; of several (then it is one block) the smallest."""
    return next((size for size in _BLOCKS if -(-count // size) == blocks), None)


def _packed(rows: int, in_features: int) -> tuple[tuple[int, ...], ...]:
    nbytes = rows * in_features // 2
    return ((nbytes, 1), (1, nbytes), (rows, in_features // 2))


def _check_numbers(found: torch.Tensor, kind: str) -> None:
    import torch

    if not torch.equal(found.cpu(), torch.tensor(NUMBERS[kind], dtype=torch.float32)):
        raise QuantError(f"its weight.quant_map has other numbers than those of {kind}")


def _parsed(data: bytes) -> Mapping[str, Any]:
    try:
        state = json.loads(data)
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise QuantError(f"its quant_state is no JSON object: {data[:60]!r}")
    return state


def _check_block(key: str, state: Mapping[str, Any], block: int, *, count: int) -> None:
    """Any size will do where all numbers are one block."""
    found = state.get(key)
    if type(found) is not int or (found != block and not (count <= block and count <= found)):
        raise QuantError(f"its quant_state says {key} {str(found)[:60]}, but its scales are for {block}")

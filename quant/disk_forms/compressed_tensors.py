"""Checkpoints of quant_method compressed-tensors: which config group a module is of, and the form that this gives it.

https://github.com/vllm-project/compressed-tensors: config.json holds `config_groups`, each with its `targets` and the
QuantizationArgs of their `weights`, and a list of modules to `ignore`. What lies on disk decides whether a weight is
quantized; its group says how its numbers are to be read. The `format` is not needed for that: it is only asked whether
it is one that can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quant.disk_forms.compressed_config import WeightArgs, checked_patterns, weight_targets
from quant.disk_forms.compressed_forms import CodesOnDisk, Fp4OnDisk, IntegersOnDisk
from quant.disk_forms.form import DiskForm, DiskTensor, FoundTensor
from quant.disk_forms.scales import E8M0, FLOATS, OF_ACTIVATIONS
from quant.dtypes import DType
from quant.errors import QuantError
from quant.float8 import Fp8PerBlock, Fp8PerChannel, Fp8PerTensor
from quant.int4 import IntPerGroup
from quant.int8 import Int8PerChannel
from quant.microscaling import MX_BLOCK, NV_BLOCK, MxFp4, MxFp8, NvFp4
from quant.module_patterns import REGEX, WRAPPERS, matches

_LINEAR = ("Linear", "LinearBase", "Module")  # what a linear module's class and its bases are called
_ATTENTION = ("q_proj", "k_proj", "v_proj")  # scales of their outputs are those of the attention's cache


def _unused(reason: str, *leaves: str) -> tuple[DiskTensor, ...]:
    return tuple(DiskTensor(leaf, (), (), optional=True, unused=reason) for leaf in leaves)


_INPUTS = _unused(OF_ACTIVATIONS, "input_scale", "input_zero_point", "input_global_scale")
_OUTPUTS = _unused(OF_ACTIVATIONS, "output_scale", "output_zero_point")
_SHAPE = _unused("the weight's shape, which the configuration gives as well", "weight_shape")
_NO_ZEROS = _unused("zero points of a weight that is symmetric by its configuration: zeros", "weight_zero_point")
_NO_ORDER = _unused("an order of groups, of which the weight has none", "weight_g_idx")
_BESIDE_ATTENTION = (*_INPUTS, *_SHAPE)
_BESIDE = (*_BESIDE_ATTENTION, *_OUTPUTS)


@dataclass(frozen=True)
class CompressedTensors:
    """A configuration of quant_method compressed-tensors. `targets`: pattern -> how, the last of equal ones holds."""

    targets: Mapping[str, WeightArgs]
    ignore: tuple[str, ...] = ()
    name: str = "compressed-tensors"

    def form_of(self, module: str, found: Mapping[str, FoundTensor], shape: tuple[int, int]) -> DiskForm | None:
        """A weight that is wide on disk is wide, whatever the configuration says."""
        weight = found.get("weight_packed") or found.get("weight")
        if weight is None:
            return None
        if "weight_packed" in found and "weight" in found:
            raise QuantError("weight and weight_packed are both there")
        if weight.dtype.is_wide:
            if "weight_scale" in found:
                raise QuantError(
                    "its weight is not quantized on disk, but has a weight_scale (quantization_status frozen?): "
                    "compress the checkpoint first"
                )
            return None
        args = self._args_of(module)
        if args is None:
            raise QuantError(f"its weight is quantized, but no config group targets it ({self._shown()})")
        beside = _BESIDE_ATTENTION if module.rpartition(".")[2] in _ATTENTION else _BESIDE
        return _form(args, found, shape, beside=beside)

    def excludes(self, module: str) -> bool:
        """By `ignore`, or for no group targets it."""
        names = _names(module)
        if not self._ignored.isdisjoint(names) or any(matches(p, names, classes=_LINEAR) for p in self._ignored_by):
            return True
        return self._args_of(module) is None

    def _args_of(self, module: str) -> WeightArgs | None:
        """As the library chooses: an exact name before an expression before a class, each in alphabetical order."""
        names = _names(module)
        for name in names:
            if name in self._exact:
                return self.targets[self._exact[name]]
        found = next((pattern for pattern in self._others if matches(pattern, names, classes=_LINEAR)), None)
        return None if found is None else self.targets[found]

    @cached_property
    def _exact(self) -> dict[str, str]:
        """Names of modules -> the target that says so."""
        return {name: target for target in sorted(self.targets, reverse=True) for name in _spellings(target)}

    @cached_property
    def _others(self) -> tuple[str, ...]:
        expressions = sorted(target for target in self.targets if target.startswith(REGEX))
        return (*expressions, *sorted(target for target in self.targets if target in _LINEAR))

    @cached_property
    def _ignored(self) -> frozenset[str]:
        return frozenset(name for pattern in self.ignore for name in _spellings(pattern))

    @cached_property
    def _ignored_by(self) -> tuple[str, ...]:
        return tuple(pattern for pattern in self.ignore if pattern.startswith(REGEX) or pattern in _LINEAR)

    def _shown(self) -> str:
        names = list(self.targets)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"targets: {', '.join(name[:60] for name in names[:3]) or 'none'}{more}"


def _names(module: str) -> tuple[str, ...]:
    """What a configuration may call a module: as the checkpoint does, and without the words of a wrapper."""
    words = module.split(".")
    first = next((index for index, word in enumerate(words) if word not in WRAPPERS), 0)
    bare = ".".join(words[first:])
    return tuple(dict.fromkeys((module, f"model.{bare}", bare)))


def _spellings(pattern: str) -> tuple[str, ...]:
    """Of a module's name those that it may go by; of an expression or a class none."""
    return () if pattern.startswith(REGEX) or pattern in _LINEAR else _names(pattern)


def compressed_method(config: Mapping[str, Any]) -> CompressedTensors:
    """The method of a quantization_config. Raises QuantError for what cannot be read."""
    return CompressedTensors(weight_targets(config), checked_patterns(config, "ignore"))


# --- forms


def _form(
    args: WeightArgs, found: Mapping[str, FoundTensor], shape: tuple[int, int], *, beside: tuple[DiskTensor, ...]
) -> DiskForm:
    if "weight_scale" not in found:
        raise QuantError("its weight is quantized, but it has no weight_scale")
    if args.is_float and "weight_packed" in found:
        return Fp4OnDisk(_kept_fp4(args), (*beside, *_NO_ZEROS))
    codes = found.get("weight_packed") or found["weight"]
    packed = "weight_packed" in found
    wanted = DType.F8_E4M3 if args.is_float else DType.I32 if packed else DType.I8
    if codes.dtype is not wanted:
        leaf = "weight_packed" if packed else "weight"
        kind = f"{args.bits}-bit {'floats' if args.is_float else 'integers'}"
        raise QuantError(f"{leaf} is {codes.dtype.value}, but {kind} are {wanted.value} there")
    if args.is_float:
        return CodesOnDisk(_kept_fp8(args, found["weight_scale"]), args.strategy, (*beside, *_NO_ZEROS))
    return _integers(args, found, shape, packed=packed, beside=beside)


def _integers(
    args: WeightArgs,
    found: Mapping[str, FoundTensor],
    shape: tuple[int, int],
    *,
    packed: bool,
    beside: tuple[DiskTensor, ...],
) -> DiskForm:
    grouped = args.strategy == "group"
    if not packed and args.bits == 8 and args.symmetric and not grouped:
        return CodesOnDisk(Int8PerChannel(), args.strategy, (*beside, *_NO_ZEROS, *_NO_ORDER))
    scale = found["weight_scale"].dtype
    if scale not in FLOATS:
        raise QuantError(f"weight_scale is {scale.value}: scales of integers are F32, BF16 or F16")
    ordered = grouped and "weight_g_idx" in found
    if args.ordered and not ordered:
        raise QuantError("its groups are of ordered inputs (actorder), but it has no weight_g_idx")
    kept = IntPerGroup(
        bits=4 if args.bits <= 4 else 8, group_size=args.group_size, symmetric=args.symmetric, scale_dtype=scale,
        ordered=ordered,
    )  # fmt: skip
    unused = (*beside, *(_NO_ZEROS if args.symmetric else ()), *(() if ordered else _NO_ORDER))
    zeros = None if args.symmetric else _zeros(found)
    return IntegersOnDisk(kept, args.bits, args.strategy, packed, shape[1], zeros, unused)


def _zeros(found: Mapping[str, FoundTensor]) -> DType:
    zeros = found.get("weight_zero_point")
    if zeros is None:
        raise QuantError("its weight is not symmetric, but it has no weight_zero_point")
    if zeros.dtype not in (DType.I32, DType.I8):
        raise QuantError(f"weight_zero_point is {zeros.dtype.value}: zero points are I32 (packed) or I8")
    return zeros.dtype


def _kept_fp4(args: WeightArgs) -> MxFp4 | NvFp4:
    if args.bits == 4 and args.group_size == MX_BLOCK:
        return MxFp4()
    if args.bits == 4 and args.group_size == NV_BLOCK:
        return NvFp4(divides=True)
    raise QuantError(
        f"packed floats of {args.bits} bits in groups of {args.group_size}: those of 4 bits in groups of {MX_BLOCK} "
        f"(mxfp4) and {NV_BLOCK} (nvfp4) can be read"
    )


def _kept_fp8(args: WeightArgs, scale: FoundTensor) -> Fp8PerTensor | Fp8PerChannel | Fp8PerBlock | MxFp8:
    if args.strategy == "tensor":
        return Fp8PerTensor()
    if args.strategy == "channel":
        return Fp8PerChannel()
    if args.strategy == "block":
        return Fp8PerBlock(block=args.block)
    if scale.dtype in FLOATS:
        return Fp8PerBlock(block=(1, args.group_size))
    if args.group_size == MX_BLOCK and scale.dtype in E8M0:
        return MxFp8()
    raise QuantError(
        f"FP8 in groups of {args.group_size} with {scale.dtype.value} scales: E8M0 scales are read for groups of "
        f"{MX_BLOCK} (mxfp8)"
    )

"""GPTQ on disk: integers of 2, 3, 4 or 8 bits in groups of inputs, packed along the inputs, as AutoGPTQ and GPTQModel
write them.

A weight of O outputs and I inputs is `qweight` int32 [ceil(I * bits / 32), O], lowest bits first; `scales` [G, O];
`qzeros` int32 [G, ceil(O * bits / 32)], packed along the outputs; and, where inputs were quantized in another order
than theirs (desc_act), `g_idx` [I], the group of each. number = (code - zero) * scale.

Zero points are kept as they are on disk whether the configuration says `sym` or not: the numbers decide. In the first
version of the format they are stored minus one; a zero point of 0 is the code of all ones there, so that one is added
modulo 2^bits. (Readers differ in that one code: some take it for 2^bits, which no quantizer makes.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quant.disk_forms.form import DiskForm, DiskTensor, FoundTensor
from quant.disk_forms.scales import FLOATS, float_dtype
from quant.disk_forms.settings import LARGEST, is_set, stated, whole_number, word
from quant.dtypes import DType
from quant.errors import QuantError
from quant.int4 import IntPerGroup
from quant.module_patterns import REGEX, check_patterns, matches

if TYPE_CHECKING:
    import torch

BITS = (2, 3, 4, 8)
_OFFSETS = {"gptq": 1, "gptq_v1": 1, "gptq_v2": 0}  # checkpoint_format -> what to add to a stored zero point
_EXCEPT, _ALSO = "-:", "+:"  # how the rules of GPTQModel's `dynamic` begin


@dataclass(frozen=True)
class GptqOnDisk:
    """`group_size` 0: one group for all inputs. `offset` is added to each stored zero point."""

    bits: int
    group_size: int
    offset: int
    ordered: bool
    scale_dtype: DType

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return f"GPTQ, {self.bits} bits in {f'groups of {self.group_size}' if self.group_size else 'one group'}"

    @property
    def kept(self) -> IntPerGroup:
        """Codes of less than 4 bits are kept as 4-bit codes."""
        return IntPerGroup(
            bits=max(4, self.bits), group_size=self.group_size, symmetric=False,
            scale_dtype=self.scale_dtype, ordered=self.ordered,
        )  # fmt: skip

    def tensors(self, rows: int, in_features: int) -> tuple[DiskTensor, ...]:
        """A g_idx of the usual order is none of them: it is a tensor without a home, dropped for its numbers."""
        groups = -(-in_features // (self.group_size or max(1, in_features)))
        order = (DiskTensor("g_idx", ((in_features,),), (DType.I32, DType.I64), "g_idx"),) if self.ordered else ()
        return (
            DiskTensor("qzeros", ((groups, words(rows, bits=self.bits)),), (DType.I32,), "weight_zero_point"),
            DiskTensor("scales", ((groups, rows),), FLOATS, "weight_scale"),
            *order,
            DiskTensor("qweight", ((words(in_features, bits=self.bits), rows),), (DType.I32,), "weight"),
        )

    def place(self, leaf: str, tensor: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        """Codes are turned, scales stay what they are."""
        from quant.disk_forms.packed_words import codes_of_words, keep_columns

        if leaf == "qweight":
            keep_columns(tensor, out["weight"], bits=self.bits)
        elif leaf == "scales":
            out["weight_scale"].copy_(tensor.t())
        elif leaf == "qzeros":
            zeros = codes_of_words(tensor, out["weight_zero_point"].shape[0], bits=self.bits)
            mask = (1 << self.bits) - 1
            out["weight_zero_point"].copy_(zeros.add_(self.offset).bitwise_and_(mask).t())
        else:
            self._place_order(tensor, out)

    def _place_order(self, order: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
        from quant.int4_codec import check_order

        check_order(order, groups=out["weight_scale"].shape[1])
        out["g_idx"].copy_(order)


def words(codes: int, *, bits: int) -> int:
    """32-bit words that so many codes fill."""
    return -(-codes * bits // 32)


@dataclass(frozen=True)
class GptqRule:
    """A rule of `dynamic`: modules whose names the pattern fits are `excluded`, or have settings of their own."""

    pattern: str
    excluded: bool = False
    bits: int | None = None
    group_size: int | None = None
    desc_act: bool | None = None


@dataclass(frozen=True)
class GptqMethod:
    """A configuration of quant_method gptq. The first of its rules that fits a module is applied to it."""

    bits: int
    group_size: int
    offset: int
    desc_act: bool = False
    rules: tuple[GptqRule, ...] = ()
    name: str = "gptq"

    def form_of(self, module: str, found: Mapping[str, FoundTensor], shape: tuple[int, int]) -> DiskForm | None:
        """What the tensors show: codes are `qweight`, and a wide weight stays wide."""
        if "qweight" not in found:
            return None
        if "weight" in found:
            raise QuantError("weight and qweight are both there")
        rule = self._rule_of(module)
        if rule is not None and rule.excluded:
            raise QuantError(
                f"qweight is there, but {_EXCEPT}{rule.pattern.removeprefix(REGEX)} of dynamic excludes it"
            )
        bits, group_size, desc_act = self.bits, self.group_size, self.desc_act
        if rule is not None:
            bits = bits if rule.bits is None else rule.bits
            group_size = group_size if rule.group_size is None else rule.group_size
            desc_act = desc_act if rule.desc_act is None else rule.desc_act
        scale_dtype = float_dtype(found.get("scales"))
        return GptqOnDisk(bits, group_size, self.offset, desc_act and group_size > 0, scale_dtype)

    def excludes(self, module: str) -> bool:
        """By a rule of `dynamic`."""
        rule = self._rule_of(module)
        return rule is not None and rule.excluded

    def _rule_of(self, module: str) -> GptqRule | None:
        return next((rule for rule in self.rules if matches(rule.pattern, (module,))), None)


def gptq_method(config: Mapping[str, Any]) -> GptqMethod:
    """The method of a quantization_config (or a quantize_config.json). Raises QuantError for what cannot be read."""
    form = word(config, "checkpoint_format", "format", default="gptq")
    if is_set(config, "is_marlin_format"):
        form = "marlin"
    if form not in _OFFSETS:
        raise QuantError(
            f"checkpoint_format {form!r}: {', '.join(_OFFSETS)} can be read, and not the tiles of a kernel"
        )
    if (unit := word(config, "pack_dtype", default="int32").removeprefix("torch.")) != "int32":
        raise QuantError(f"pack_dtype {unit!r}: codes that are packed in int32 can be read")
    bits = _bits(whole_number(config, "bits", "w_bit", "wbits"))
    group_size = _group_size(whole_number(config, "group_size", "q_group_size", "groupsize"))
    return GptqMethod(bits, group_size, _OFFSETS[form], is_set(config, "desc_act"), _rules(config))


def _bits(bits: int) -> int:
    if bits not in BITS:
        raise QuantError(f"bits {bits}: GPTQ weights of {', '.join(map(str, BITS))} bits can be read")
    return bits


def _group_size(size: int) -> int:
    """0 for one group; -1 on disk."""
    if not -1 <= size <= LARGEST or size == 0:
        raise QuantError(f"group_size {str(size)[:20]}: a positive number to {LARGEST}, or -1 for one group, is needed")
    return max(0, size)


def _rules(config: Mapping[str, Any]) -> tuple[GptqRule, ...]:
    found = stated(config, "dynamic")
    if found is None or found is False:
        return ()
    if not isinstance(found, Mapping):
        raise QuantError(f"dynamic {str(found)[:80]!r}: an object of patterns is needed")
    rules = tuple(_rule(pattern, settings) for pattern, settings in found.items())
    check_patterns(rule.pattern for rule in rules)
    return rules


def _rule(pattern: str, settings: Any) -> GptqRule:
    expression = REGEX + pattern.removeprefix(_EXCEPT).removeprefix(_ALSO)
    if pattern.startswith(_EXCEPT):
        return GptqRule(expression, excluded=True)
    if not isinstance(settings, Mapping):
        raise QuantError(f"dynamic {pattern[:80]!r}: {str(settings)[:80]!r} is no object of settings")
    rule = GptqRule(expression)
    if settings.get("bits") is not None:
        rule = replace(rule, bits=_bits(whole_number(settings, "bits")))
    if settings.get("group_size") is not None:
        rule = replace(rule, group_size=_group_size(whole_number(settings, "group_size")))
    if settings.get("desc_act") is not None:
        rule = replace(rule, desc_act=is_set(settings, "desc_act"))
    return rule

"""GPTQ and AWQ tensors become kept codes, scales and zero points to the bit, at sizes that fill no tile and no word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quant.disk_forms.awq import AwqOnDisk, awq_method
from quant.disk_forms.form import DiskForm, FoundTensor, fill
from quant.disk_forms.gptq import GptqOnDisk, gptq_method
from quant.dtypes import DType, to_torch
from quant.errors import QuantError
from tests.quant.word_packing import Codes, kept_bytes, packed_across, packed_awq, packed_down

SIZES = [(64, 40), (72, 24), (1600, 8), (1608, 520)]  # inputs, outputs
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def drawn(shape: tuple[int, int], bits: int) -> Codes:
    return np.random.default_rng(bits).integers(0, 1 << bits, shape)


def filled(form: DiskForm, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """What is kept; the memory held other bytes before."""
    specs = form.kept.storage((shape[0],), shape[1], wide=DType.BF16)
    out = {name: torch.full(spec.shape, 85, dtype=to_torch(spec.dtype)) for name, spec in specs.items()}
    fill(form, tensors, out, shape=shape)
    return out


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 1])
def test_gptq_is_kept_to_the_bit(bits: int, size: tuple[int, int], offset: int) -> None:
    inputs, outputs = size
    groups = -(-inputs // 64)  # 72 and 1608 leave a short last group
    codes, zeros = drawn(size, bits), drawn((groups, outputs), bits)
    scales = torch.randn(groups, outputs).half()
    tensors = {
        "qweight": packed_down(codes, bits),
        "qzeros": packed_across((zeros - offset) % (1 << bits), bits),
        "scales": scales,
    }
    form = GptqOnDisk(bits, 64, offset, ordered=False, scale_dtype=DType.F16)
    declared = {one.leaf: one.shapes[0] for one in form.tensors(outputs, inputs)}
    assert declared == {leaf: tuple(tensor.shape) for leaf, tensor in tensors.items()}
    kept = filled(form, tensors, (outputs, inputs))
    assert torch.equal(kept["weight"], kept_bytes(codes, bits))
    assert torch.equal(kept["weight_zero_point"], torch.from_numpy(zeros.T.astype(np.uint8)))
    assert torch.equal(kept["weight_scale"], scales.T)
    group = np.arange(inputs) // 64
    wide = (codes - zeros[group]).astype(np.float32) * scales.float().numpy()[group]
    found = form.kept.dequantize(kept, (outputs,), dtype=torch.float32, in_features=inputs)
    assert torch.equal(found, torch.from_numpy(wide.T.copy()))


def test_gptq_keeps_the_order_of_groups_and_one_group_for_all() -> None:
    codes, zeros = drawn((64, 32), 4), drawn((2, 32), 4)
    order = torch.from_numpy(np.random.default_rng(0).permutation(np.arange(64) // 32))
    tensors = {"qweight": packed_down(codes, 4), "qzeros": packed_across(zeros, 4), "scales": torch.rand(2, 32)}
    ordered = GptqOnDisk(4, 32, 0, ordered=True, scale_dtype=DType.F32)
    kept = filled(ordered, tensors | {"g_idx": order}, (32, 64))
    assert torch.equal(kept["g_idx"], order[None].int())
    wide = (codes - zeros[order]).astype(np.float32) * tensors["scales"].numpy()[order]
    assert torch.equal(ordered.kept.dequantize(kept, (32,), dtype=torch.float32), torch.from_numpy(wide.T.copy()))
    for wrong in (order - 1, order + 1):
        with pytest.raises(QuantError, match=r"g_idx names groups (-1 to 0|1 to 2), but there are 2"):
            filled(ordered, tensors | {"g_idx": wrong}, (32, 64))

    whole = GptqOnDisk(4, 0, 0, ordered=False, scale_dtype=DType.F32)
    one = {"qweight": tensors["qweight"], "qzeros": packed_across(zeros[:1], 4), "scales": tensors["scales"][:1]}
    wide = (codes - zeros[:1]).astype(np.float32) * one["scales"].numpy()
    found = whole.kept.dequantize(filled(whole, one, (32, 64)), (32,), dtype=torch.float32)
    assert torch.equal(found, torch.from_numpy(wide.T.copy()))


def test_an_odd_number_of_inputs_leaves_the_last_nibble_empty() -> None:
    codes = drawn((33, 16), 4)
    form = GptqOnDisk(4, 0, 0, ordered=False, scale_dtype=DType.F16)
    zeros, scales = packed_across(drawn((1, 16), 4), 4), torch.rand(1, 16).half()
    kept = filled(form, {"qweight": packed_down(codes, 4), "qzeros": zeros, "scales": scales}, (16, 33))
    assert torch.equal(kept["weight"], kept_bytes(codes, 4))


@pytest.mark.parametrize("size", [(64, 40), (96, 8), (1600, 520)])
@pytest.mark.parametrize("layout", ["gemm", "gemv"])
def test_awq_is_kept_to_the_bit(size: tuple[int, int], layout: str) -> None:
    inputs, outputs = size
    codes, zeros = drawn(size, 4), drawn((inputs // 32, outputs), 4)
    scales = torch.randn(inputs // 32, outputs).bfloat16()
    if layout == "gemm":
        tensors = {"qweight": packed_awq(codes), "qzeros": packed_awq(zeros), "scales": scales}
    else:
        width = -(-(inputs // 32) // 32) * 4  # groups of 32: zero points fill fours of words
        padded = np.pad(zeros.T, ((0, 0), (0, 8 * width - inputs // 32)), constant_values=3)
        wide_scales = torch.full((outputs, 8 * width), 7.0).bfloat16()
        wide_scales[:, : inputs // 32] = scales.T
        tensors = {
            "qweight": packed_across(codes.T, 4), "qzeros": packed_across(padded, 4), "scales": wide_scales
        }  # fmt: skip
    form = AwqOnDisk(layout, 32, DType.BF16)
    declared = {one.leaf: one.shapes[0] for one in form.tensors(outputs, inputs)}
    assert declared == {leaf: tuple(tensor.shape) for leaf, tensor in tensors.items()}
    kept = filled(form, tensors, (outputs, inputs))
    assert torch.equal(kept["weight"], kept_bytes(codes, 4))
    assert torch.equal(kept["weight_zero_point"], torch.from_numpy(zeros.T.astype(np.uint8)))
    assert torch.equal(kept["weight_scale"], scales.T)


class Made(TorchDispatchMode):
    """Bytes of the largest tensor that was made, views apart."""

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (list, tuple)) else (made,):
            if one.untyped_storage().data_ptr() not in self.given:
                self.largest = max(self.largest, one.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize(
    "form", [GptqOnDisk(4, 0, 0, ordered=False, scale_dtype=DType.F16), AwqOnDisk("gemm", 0, DType.F16)]
)
def test_codes_are_turned_in_tiles_that_are_small_beside_the_tensor(form: DiskForm) -> None:
    shape = next(one.shapes[0] for one in form.tensors(2048, 8192) if one.leaf == "qweight")
    words, out = torch.zeros(shape, dtype=torch.int32), torch.empty(2048, 4096, dtype=torch.uint8)
    with Made((words, out)) as found:
        form.place("qweight", words, {"weight": out})
    assert 0 < found.largest <= words.nbytes // 16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": None}, "bits is missing"),
        ({"bits": 5}, "bits 5: GPTQ weights of 2, 3, 4, 8 bits"),
        ({"bits": "four"}, "bits 'four' is no whole number"),
        ({"group_size": 0}, "group_size 0"),
        ({"group_size": None}, "group_size is missing"),
        ({"desc_act": "yes"}, "desc_act 'yes' is neither true nor false"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"is_marlin_format": True}, "checkpoint_format 'marlin'"),
        ({"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        ({"dynamic": ["x"]}, "dynamic"),
        ({"dynamic": {"+:x": 4}}, "is no object of settings"),
        ({"dynamic": {"+:(x+)+y": {"bits": 8}}}, "repeats a group"),
        ({"dynamic": {"x": {"bits": 7}}}, "bits 7"),
    ],
)
def test_a_gptq_configuration_that_cannot_be_read_says_why(change: Mapping[str, object], words: str) -> None:
    with pytest.raises(QuantError) as raised:
        gptq_method({**GPTQ, **change})
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": 3}, "bits 3: AWQ weights of 4 bits"),
        ({"version": "gemv_fast"}, "version 'gemv_fast': the layouts gemm and gemv"),
        ({"version": "marlin"}, "version 'marlin'"),
        ({"version": 2}, "version '2' is no word"),
        ({"group_size": -2}, "group_size -2"),
        ({"version": "gemv", "group_size": 16}, "group_size 16"),
        ({"modules_to_not_convert": "lm_head"}, "a list of names is needed"),
    ],
)
def test_an_awq_configuration_that_cannot_be_read_says_why(change: Mapping[str, object], words: str) -> None:
    with pytest.raises(QuantError) as raised:
        awq_method({**AWQ, **change})
    assert words in str(raised.value)


def test_the_first_rule_that_fits_a_module_sets_what_it_names() -> None:
    dynamic = {
        "-:.*\\.o_proj": {},
        "+:.*\\.layers\\.1\\..*": {"bits": 8, "group_size": -1},
        ".*\\.layers\\.[12]\\..*": {"desc_act": True},
    }
    method = gptq_method({**GPTQ, "dynamic": dynamic})
    found = {"qweight": FoundTensor((8, 64), DType.I32), "scales": FoundTensor((2, 64), DType.BF16)}

    def form(module: str) -> object:
        return method.form_of(module, found, (64, 64))

    assert form("model.layers.0.mlp.up_proj") == GptqOnDisk(4, 32, 1, ordered=False, scale_dtype=DType.BF16)
    assert form("model.layers.1.mlp.up_proj") == GptqOnDisk(8, 0, 1, ordered=False, scale_dtype=DType.BF16)
    assert form("model.layers.2.mlp.up_proj") == GptqOnDisk(4, 32, 1, ordered=True, scale_dtype=DType.BF16)
    assert method.excludes("model.layers.1.self_attn.o_proj")
    with pytest.raises(QuantError, match="of dynamic excludes it"):
        form("model.layers.1.self_attn.o_proj")

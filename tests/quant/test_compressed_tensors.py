"""compressed-tensors: forms equal the library's own reading to the bit; groups are chosen as it chooses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from quant.disk_forms.compressed_tensors import CompressedTensors, compressed_method
from quant.disk_forms.form import DiskForm, FoundTensor, fill
from quant.dtypes import DType, to_torch
from quant.errors import QuantError
from tests.quant.compressed import Tensors, args, config, float4, float8, integers

DTYPES = {to_torch(dtype): dtype for dtype in DType if dtype not in (DType.U16, DType.U32, DType.U64)}


def form_of(method: CompressedTensors, tensors: Tensors, shape: tuple[int, int], module: str = "m") -> DiskForm:
    found = {leaf: FoundTensor(tuple(tensor.shape), DTYPES[tensor.dtype]) for leaf, tensor in tensors.items()}
    form = method.form_of(module, found, shape)
    assert form is not None
    return form


def kept(form: DiskForm, tensors: Tensors, shape: tuple[int, int]) -> Tensors:
    """What is kept of a weight, from its tensors; headers fit the form."""
    for one in form.tensors(*shape):
        if one.fills:
            assert tuple(tensors[one.leaf].shape) in one.shapes
            assert DTYPES[tensors[one.leaf].dtype] in one.dtypes
    specs = form.kept.storage((shape[0],), shape[1], wide=DType.BF16)
    out = {name: torch.full(spec.shape, 77, dtype=torch.uint8).to(to_torch(spec.dtype)) for name, spec in specs.items()}
    fill(form, tensors, form.kept.section_views(out, (shape[0],), 0), shape=shape)
    return out


def wide(form: DiskForm, tensors: Tensors, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return form.kept.dequantize(kept(form, tensors, shape), (shape[0],), dtype=dtype)[:, : shape[1]]


def read(weights: Mapping[str, Any], tensors: Tensors, shape: tuple[int, int]) -> torch.Tensor:
    return wide(form_of(compressed_method(config(weights)), tensors, shape), tensors, shape)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("as_words", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("shape", [(16, 64), (13, 37)])
def test_integers_of_any_width_are_read_code_by_code(
    shape: tuple[int, int], bits: int, as_words: bool, symmetric: bool
) -> None:
    weights = args(bits, "int", "group", group_size=16) | {"symmetric": symmetric}
    tensors, expected = integers(torch.randn(shape), bits=bits, size=16, symmetric=symmetric, as_words=as_words)
    assert torch.equal(read(weights, tensors, shape), expected)


@pytest.mark.parametrize(
    ("bits", "columns", "straight"), [(4, 64, True), (8, 64, True), (4, 36, False), (3, 64, False)]
)
def test_words_that_end_with_the_row_are_the_kept_bytes(bits: int, columns: int, straight: bool) -> None:
    tensors, _ = integers(torch.randn(6, columns), bits=bits, size=0)
    form = form_of(compressed_method(config(args(bits, "int", "channel"))), tensors, (6, columns))
    codes = form.tensors(6, columns)[-1]
    assert (codes.fills, codes.as_is) == ("weight", straight)
    if straight:
        assert torch.equal(kept(form, tensors, (6, columns))["weight"], tensors["weight_packed"].view(torch.uint8))


def test_the_half_byte_behind_an_odd_row_is_zero_whatever_lies_in_the_file() -> None:
    tensors, expected = integers(torch.randn(3, 7), bits=4, size=0)
    tensors["weight_packed"] |= -0x10000000
    form = form_of(compressed_method(config(args(4, "int", "channel"))), tensors, (3, 7))
    found = kept(form, tensors, (3, 7))
    assert not (found["weight"][:, -1] >> 4).any()
    assert torch.equal(wide(form, tensors, (3, 7)), expected)


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("as_words", [True, False])
def test_scales_of_rows_and_of_the_whole_tensor(strategy: str, symmetric: bool, as_words: bool) -> None:
    scale = torch.tensor([0.02]) if strategy == "tensor" else torch.rand(9, 1)
    zero = torch.tensor([-5]) if strategy == "tensor" else torch.randint(-128, 128, (9, 1))
    codes = torch.randint(-128, 128, (9, 20))
    codes[0, 0] = -128
    tensors, _ = integers(torch.randn(9, 20), bits=8, size=0, symmetric=symmetric, as_words=as_words)
    tensors["weight_scale"] = scale
    if as_words:
        tensors["weight_packed"] = (codes + 128).to(torch.uint8).view(torch.int32)
    else:
        tensors["weight"] = codes.to(torch.int8)
    if not symmetric:
        tensors["weight_zero_point"] = zero.to(torch.int8)
    weights = args(8, "int", strategy) | {"symmetric": symmetric}
    assert torch.equal(read(weights, tensors, (9, 20)), (codes - (0 if symmetric else zero)) * scale)


def test_an_order_of_groups_is_kept_and_minus_ones_are_none() -> None:
    tensors, _ = integers(torch.randn(4, 32), bits=4, size=8)
    method = compressed_method(config(args(4, "int", "group", group_size=8, actorder="group")))
    codes = torch.stack(
        (tensors["weight_packed"].view(torch.uint8) & 15, tensors["weight_packed"].view(torch.uint8) >> 4), 2
    )
    numbers = codes.flatten(1).float() - 8
    for order, groups in (
        (torch.randperm(32) // 8, None), (torch.full((32,), -1), torch.arange(32) // 8),
    ):  # fmt: skip
        tensors["weight_g_idx"] = order.int()
        by_number = tensors["weight_scale"].float()[:, order if groups is None else groups]
        assert torch.equal(wide(form_of(method, tensors, (4, 32)), tensors, (4, 32)), numbers * by_number)
    tensors["weight_g_idx"] = torch.full((32,), 4, dtype=torch.int32)
    with pytest.raises(QuantError, match="g_idx names groups 4 to 4, but there are 4"):
        kept(form_of(method, tensors, (4, 32)), tensors, (4, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("weights", "height", "width"),
    [
        (args(8, "float", "tensor"), 130, 140),
        (args(8, "float", "channel"), 1, 140),
        (args(8, "float", "block", block_structure=[128, 128]), 128, 128),
        (args(8, "float", "block", block_structure="64x32"), 64, 32),
        (args(8, "float", "group", group_size=32), 1, 32),
    ],
)
def test_fp8_with_scales_of_each_strategy(weights: dict[str, Any], height: int, width: int, dtype: torch.dtype) -> None:
    scale = (torch.rand(-(-130 // height), -(-140 // width)) + 0.01).to(dtype)
    by_number = scale.repeat_interleave(height, 0)[:130].repeat_interleave(width, 1)[:, :140]
    tensors, expected = float8(torch.randn(130, 140), scale, by_number)
    assert torch.equal(read(weights, tensors, (130, 140)), expected)


def test_microscaled_formats() -> None:
    weight = torch.randn(6, 64)
    tensors, expected = float4(weight, block=32)
    assert torch.equal(read(args(4, "float", "group", group_size=32), tensors, (6, 64)), expected)
    tensors, expected = float4(weight, block=16, divisor=4096.0)
    assert torch.equal(read(args(4, "float", "tensor_group", group_size=16), tensors, (6, 64)), expected)
    tensors, expected = float4(weight, block=16, divisor=1234.5)  # the reciprocal is rounded, and the product
    torch.testing.assert_close(
        read(args(4, "float", "tensor_group", group_size=16), tensors, (6, 64)), expected, rtol=2.5e-7, atol=0
    )
    scale = torch.randint(118, 130, (6, 2)).to(torch.uint8)
    by_number = torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    tensors, expected = float8(weight, scale, by_number)
    assert torch.equal(read(args(8, "float", "group", group_size=32), tensors, (6, 64)), expected)


# --- against the library

LIBRARY = {
    "pack-quantized int4 group": ("pack-quantized", args(4, "int", "group", group_size=32)),
    "pack-quantized int4 group asym": ("pack-quantized", args(4, "int", "group", group_size=32) | {"symmetric": False}),
    "pack-quantized int3 channel": ("pack-quantized", args(3, "int", "channel")),
    "pack-quantized int8 channel asym": ("pack-quantized", args(8, "int", "channel") | {"symmetric": False}),
    "int-quantized channel": ("int-quantized", args(8, "int", "channel")),
    "int-quantized tensor": ("int-quantized", args(8, "int", "tensor")),
    "float-quantized tensor": ("float-quantized", args(8, "float", "tensor")),
    "float-quantized channel": ("naive-quantized", args(8, "float", "channel")),
    "float-quantized block": ("float-quantized", args(8, "float", "block", block_structure=[128, 128])),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", LIBRARY)
def test_what_the_library_compresses_is_read_as_the_library_reads_it(case: str, dtype: torch.dtype) -> None:
    library = pytest.importorskip("compressed_tensors")
    name, weights = LIBRARY[case]
    scheme = library.quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    compressor = library.compressors.BaseCompressor.get_value_from_registry(name)
    shape = (128, 256)
    size, strategy, bits = weights.get("group_size"), weights["strategy"], weights["num_bits"]
    scales = {"tensor": (1,), "channel": (128, 1), "block": (1, 2)}.get(strategy, (128, 256 // (size or 256)))
    state = {
        "weight": torch.randn(shape, dtype=dtype),
        "weight_scale": torch.rand(scales).add(1.0).mul(2.0**-bits).to(dtype),
    }
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if not weights["symmetric"] else (0, 1)
    state["weight_zero_point"] = torch.randint(low, high, scales).to(torch.int8)
    if weights["type"] == "float":
        del state["weight_zero_point"]
    compressed = compressor.compress(state, scheme)
    expected = compressor.decompress(compressed, scheme)["weight"]
    read_config = config(scheme.model_dump()["weights"], format=name)
    form = form_of(compressed_method(read_config), compressed, shape)
    assert torch.equal(wide(form, compressed, shape, dtype), expected)


@pytest.mark.parametrize("divisor", [512.0, 300.0, 7.3])
@pytest.mark.parametrize("name", ["mxfp4-pack-quantized", "nvfp4-pack-quantized", "mxfp8-quantized"])
def test_small_floats_are_read_as_the_library_reads_them(name: str, divisor: float) -> None:
    library = pytest.importorskip("compressed_tensors")
    weights, tensors = {
        "mxfp4-pack-quantized": (args(4, "float", "group", group_size=32), float4(torch.randn(8, 64), block=32)[0]),
        "nvfp4-pack-quantized": (
            args(4, "float", "tensor_group", group_size=16), float4(torch.randn(8, 64), block=16, divisor=divisor)[0],
        ),
        "mxfp8-quantized": (
            args(8, "float", "group", group_size=32),
            float8(torch.randn(8, 64), torch.full((8, 2), 125, dtype=torch.uint8), torch.tensor(0.25))[0],
        ),
    }[name]  # fmt: skip
    scheme = library.quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    expected = library.compressors.BaseCompressor.get_value_from_registry(name).decompress(tensors, scheme)["weight"]
    form = form_of(compressed_method(config(weights)), tensors, (8, 64))
    assert torch.equal(wide(form, tensors, (8, 64), expected.dtype), expected)


# --- groups


DOWN = "model.layers.1.mlp.down_proj"


def method(groups: Mapping[str, list[str]], ignore: list[str] | None = None) -> CompressedTensors:
    """One group for each list of targets; the n-th has 8-bit integers in groups of n + 1."""
    made = {
        name: {"targets": targets, "weights": args(8, "int", "group", group_size=index + 1)}
        for index, (name, targets) in enumerate(groups.items())
    }
    return compressed_method({"config_groups": made, "ignore": ignore})


@pytest.mark.parametrize(
    ("groups", "module", "chosen"),
    [
        ({"a": ["Linear"], "b": ["re:.*down_proj"], "c": [DOWN]}, DOWN, 3),
        ({"a": ["Linear"], "b": ["re:.*down_proj"]}, "model.layers.0.mlp.down_proj", 2),
        ({"a": ["Linear"], "b": ["re:.*down_proj"]}, "model.layers.0.mlp.up_proj", 1),
        ({"a": ["re:.*proj"], "b": ["re:.*mlp.*"]}, "model.layers.0.mlp.up_proj", 2),  # by their letters
        ({"a": ["Linear"], "b": ["Linear"]}, "model.layers.0.mlp.up_proj", 2),  # the last of equal ones
        ({"a": ["Linear"], "b": ["model.layers.1.mlp.up_proj"]}, "language_model.model.layers.1.mlp.up_proj", 2),
        ({"a": ["Linear"], "b": ["language_model.layers.1.mlp.up_proj"]}, "model.layers.1.mlp.up_proj", 2),
        ({"a": ["Linear"], "b": ["model.layers.1"]}, "model.layers.1.mlp.up_proj", 1),  # names are whole names
    ],
)  # fmt: skip
def test_the_group_of_a_module_is_the_librarys(groups: dict[str, list[str]], module: str, chosen: int) -> None:
    tensors, _ = integers(torch.randn(2, 8), bits=8, size=chosen, as_words=False)
    form = form_of(method(groups), tensors, (2, 8), module)
    assert getattr(form.kept, "group_size") == chosen  # noqa: B009


def test_the_librarys_own_choice_is_the_same() -> None:
    library = pytest.importorskip("compressed_tensors")
    targets = ["Linear", "re:.*mlp.*", "re:.*down_proj", "model.layers.0.mlp.up_proj"]
    ours = method({target: [target] for target in targets})
    for module in ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "lm_head", "model.layers.0.mlp.x"):
        (first, *_) = library.utils.match.match_targets(module, torch.nn.Linear(1, 1), targets)
        size = targets.index(first) + 1
        tensors, _ = integers(torch.randn(2, 8), bits=8, size=size, as_words=False)
        assert getattr(form_of(ours, tensors, (2, 8), module).kept, "group_size") == size  # noqa: B009


def test_what_is_ignored_or_not_targeted_is_excluded() -> None:
    found = method({"a": ["re:.*mlp.*"]}, ["lm_head", "model.layers.1.mlp.up_proj", "re:.*\\.2\\..*"])
    names = [
        "lm_head", "model.layers.1.mlp.up_proj", "language_model.model.layers.1.mlp.up_proj",
        "model.layers.2.mlp.up_proj", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj_b",
        "model.layers.11.mlp.up_proj",
    ]  # fmt: skip
    assert [found.excludes(name) for name in names] == [True, True, True, True, True, False, False]


def test_a_group_without_weights_leaves_them_wide() -> None:
    found = compressed_method({"config_groups": {"a": {"targets": ["LlamaAttention"], "weights": None}}})
    wide_weight = {"weight": FoundTensor((2, 8), DType.BF16)}
    assert found.form_of("model.layers.0.mlp.up_proj", wide_weight, (2, 8)) is None
    with pytest.raises(QuantError, match="no config group targets it \\(targets: none\\)"):
        found.form_of("model.layers.0.mlp.up_proj", {"weight": FoundTensor((2, 8), DType.I8)}, (2, 8))


def there(leaf: str, dtype: DType, *shape: int) -> dict[str, FoundTensor]:
    return {leaf: FoundTensor(shape, dtype)}


SCALE = there("weight_scale", DType.F32, 2, 1)
INT8, FP8, INT4 = args(8, "int", "channel"), args(8, "float", "channel"), args(4, "int", "channel")


@pytest.mark.parametrize(
    ("weights", "found", "words"),
    [
        (INT8, there("weight", DType.BF16, 2, 8) | SCALE, "not quantized on disk"),
        (INT8, there("weight", DType.I8, 2, 8), "it has no weight_scale"),
        (INT8, there("weight", DType.F8_E4M3, 2, 8) | SCALE, "8-bit integers are I8"),
        (FP8, there("weight", DType.F8_E5M2, 2, 8) | SCALE, "floats are F8_E4M3"),
        (INT4, there("weight_packed", DType.U8, 2, 4) | SCALE, "integers are I32"),
        (INT4 | {"symmetric": False}, there("weight_packed", DType.I32, 2, 1) | SCALE, "it has no weight_zero_point"),
        (
            args(8, "float", "group", group_size=128),
            there("weight", DType.F8_E4M3, 2, 8) | there("weight_scale", DType.U8, 2, 1),
            "FP8 in groups of 128 with U8 scales",
        ),
        (
            args(4, "float", "group", group_size=64),
            there("weight_packed", DType.U8, 2, 4) | SCALE,
            "4 bits in groups of 64",
        ),
    ],
)
def test_tensors_that_do_not_fit_their_group_are_named(
    weights: dict[str, Any], found: dict[str, FoundTensor], words: str
) -> None:
    with pytest.raises(QuantError, match=words):
        compressed_method(config(weights)).form_of("m", found, (2, 8))


def with_weights(**changes: object) -> dict[str, Any]:
    return config(args(8, "int", "channel") | changes)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config \(sparse-24-bitmask\) cannot be read"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ({"moe_sparsity_config": {"method": "prune", "num_experts": [3]}}, r"moe_sparsity_config \(prune\)"),
        ({"format": "marlin-24"}, "format 'marlin-24': these can be read"),
        ({"format": "mxfp6-pack-quantized"}, "format 'mxfp6-pack-quantized'"),
        ({"config_groups": ["a"]}, "config_groups .*an object is needed"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16 is .*targets and weights"),
        ({"config_groups": {"a": {"targets": "Linear", "weights": None}}}, "a.targets 'Linear': a list of names"),
        ({"ignore": "lm_head"}, "ignore 'lm_head': a list of names is needed"),
        ({"ignore": ["re:("]}, "is no regular expression"),
        ({"ignore": ["re:(a+)+"]}, "repeats a group"),
        (with_weights(num_bits=16), "int of 16 bits"),
        (with_weights(num_bits="8"), "int of 8 bits: int of 2 to 8"),
        (with_weights(type="float", num_bits=6), "float of 6 bits"),
        (with_weights(strategy="token"), "strategy 'token' of int weights"),
        (with_weights(strategy="block", block_structure=[128, 128]), "strategy 'block' of int weights"),
        (with_weights(type="float", strategy="block", block_structure=[64]), r"block_structure '\[64\]'"),
        (with_weights(type="float", strategy="block", block_structure="64"), "block_structure '64'"),
        (with_weights(type="float", strategy="block", block_structure=[64, True]), "block_structure"),
        (with_weights(strategy="group"), "strategy group has no group_size"),
        (with_weights(strategy="group", group_size=0), "group_size '0'"),
        (with_weights(type="float", symmetric=False), "symmetric 'False'"),
        (with_weights(dynamic=True), "dynamic weights"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_one_clear_line(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(QuantError, match=words) as raised:
        compressed_method(raw)
    assert "\n" not in str(raised.value)


def test_a_configuration_may_leave_out_what_the_library_infers() -> None:
    weights = {"num_bits": 4, "group_size": 16}
    tensors, expected = integers(torch.randn(4, 32), bits=4, size=16)
    assert torch.equal(read(weights, tensors, (4, 32)), expected)
    for key, harmless in (("sparsity_config", {}), ("sparsity_config", {"format": "dense"}), ("transform_config", {})):
        assert compressed_method(config(weights) | {key: harmless}).targets

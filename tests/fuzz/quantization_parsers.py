"""What is fuzzed of quantization: what a checkpoint says of its own, and what a user asks for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from quant.disk_forms.form import FoundTensor
from quant.disk_forms.methods import method_of
from quant.disk_forms.torchao import DESCRIBED
from quant.dtypes import DType
from quant.errors import QuantError
from quant.policy_file import parse_quantization_config
from streaming.checkpoint.files import read_json_object

_ARGS: Mapping[str, object] = {
    "num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32, "actorder": None,
    "block_structure": None, "dynamic": False,
}  # fmt: skip
_MODULE = "model.layers.0.mlp.down_proj"
CONFIGS: tuple[Mapping[str, object], ...] = (
    {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "re:.*gate$"]},
    {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False, "checkpoint_format": "gptq",
     "dynamic": {"+:.*down.*": {"bits": 8}, "-:.*up.*": {}}},
    {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["re:.*head"],
     "config_groups": {"group_0": {"targets": ["Linear"], "weights": _ARGS, "format": "pack-quantized"}}},
    {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["a*"]}},
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}},
     DESCRIBED: {f"{_MODULE}.weight": {"_type": "Int8Tensor", "_data": {"block_size": [1, 96]}}}},
)  # fmt: skip
RULES: Mapping[str, object] = {
    "default": "fp8_per_channel", "rules": [{"match": "re:.*down", "scheme": "int4_per_group:64:asym"},
                                            {"match": "mlp.up_proj", "scheme": "fp8_per_tensor", "percentile": 99.5}],
    "ignore": ["model.layers.1", "lm_head"],
}  # fmt: skip
_SHAPES = ((64, 96), (64, 3), (12, 64), (96, 8), (64, 12), (64, 1), (3, 64), (64, 48), (64,), (96,), ())
_LEAVES = (
    "weight", "weight_scale", "weight_scale_inv", "qweight", "qzeros", "scales", "g_idx", "weight_packed",
    "weight_zero_point", "weight_shape", "weight_global_scale", "weight_absmax",
)  # fmt: skip
_DTYPES = (DType.F8_E4M3, DType.I32, DType.U8, DType.F16, DType.BF16, DType.I8)


def read_stated_quantization(path: Path) -> object:
    """A quantization_config; the forms that it gives modules of many looks, and their tensors."""
    raw = read_json_object(path)
    described = raw.get(DESCRIBED)  # of torchao: what the headers' metadata says, which is objects by name
    told = described.items() if isinstance(described, dict) else ()
    raw[DESCRIBED] = {name: one for name, one in told if isinstance(one, dict)}
    try:
        method = method_of(raw)
    except QuantError as error:
        return _with_words(error)
    shapes, dtypes = itertools.cycle(_SHAPES), itertools.cycle(_DTYPES)
    for count in range(1, 40):
        found = {leaf: FoundTensor(next(shapes), next(dtypes)) for leaf in _LEAVES[: count % len(_LEAVES) + 1]}
        try:
            method.excludes(_MODULE)
            form = method.form_of(_MODULE, found, (64, 96))
            if form is not None:
                form.tensors(64, 96)
        except QuantError as error:
            _with_words(error)
    return method


def read_rules(path: Path) -> object:
    """What --quantization-config takes."""
    try:
        return parse_quantization_config(read_json_object(path))
    except QuantError as error:
        return _with_words(error)


def _with_words(error: QuantError) -> None:
    if not str(error) or "\n" in str(error) or len(str(error)) > 2000:
        raise AssertionError(f"{type(error).__name__} is no clear line: {str(error)[:200]!r}")

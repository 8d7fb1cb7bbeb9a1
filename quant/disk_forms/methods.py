"""Which method a quantization_config names, each imported when it is met. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

from quant.disk_forms.form import Method
from quant.errors import QuantError

_HOMES: Mapping[str, tuple[str, str]] = MappingProxyType({
    "fp8": ("quant.disk_forms.float8", "fp8_method"),
    "fbgemm_fp8": ("quant.disk_forms.float8", "fp8_method"),
    "bitsandbytes": ("quant.disk_forms.bitsandbytes", "bitsandbytes_method"),
    "torchao": ("quant.disk_forms.torchao", "torchao_method"),
    "mxfp8": ("quant.disk_forms.float8", "mxfp8_method"),
    "modelopt": ("quant.disk_forms.modelopt", "modelopt_method"),
    "modelopt_fp4": ("quant.disk_forms.modelopt", "modelopt_method"),
    "modelopt_mxfp8": ("quant.disk_forms.modelopt", "modelopt_method"),
    "gptq": ("quant.disk_forms.gptq", "gptq_method"),
    "gptq_marlin": ("quant.disk_forms.gptq", "gptq_method"),  # a kernel that is asked for; the files are the same
    "awq": ("quant.disk_forms.awq", "awq_method"),
    "awq_marlin": ("quant.disk_forms.awq", "awq_method"),
    "compressed-tensors": ("quant.disk_forms.compressed_tensors", "compressed_method"),
    "mxfp4": ("quant.disk_forms.mxfp4", "mxfp4_method"),
})  # fmt: skip


def method_names() -> tuple[str, ...]:
    """Every quant_method that can be read."""
    return tuple(_HOMES)


def method_of(config: Mapping[str, Any]) -> Method:
    """The method of a checkpoint's quantization_config. Raises QuantError for one that cannot be read."""
    name = config.get("quant_method")
    if not isinstance(name, str) or name not in _HOMES:
        shown = "no quant_method" if name is None else f"quant_method {str(name)[:60]!r}"
        raise QuantError(f"{shown}: checkpoints that are quantized by {', '.join(_HOMES)} can be read")
    module, function = _HOMES[name]
    found: Method = getattr(import_module(module), function)(config)
    return found

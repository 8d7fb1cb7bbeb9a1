"""Parameters of a module: declared as meta tensors, and looked up once a layer and token."""

from __future__ import annotations

import torch
from torch import nn

from layers.weights import ParamSpec
from quant.dtypes import to_torch


def declare(module: nn.Module, spec: ParamSpec) -> None:
    """Register what is stored for `spec` as meta parameters of `module`: shapes and dtypes without memory."""
    for name, stored in spec.storage().items():
        empty = torch.empty(stored.shape, dtype=to_torch(stored.dtype), device="meta")
        module.register_parameter(name, nn.Parameter(empty, requires_grad=False))


def parameter(module: nn.Module, name: str) -> torch.Tensor:
    """A parameter that the module itself has. `get_parameter` finds the same by names, modules and types, at ten times
    the price, which counts where a token costs a few milliseconds."""
    found = module._parameters[name]
    assert found is not None
    return found

"""Linear layers that hold a weight in its stored form and leave the matmul to the weight's scheme.

All are the same matmul. They differ in how their output is cut into parts, and in what the ranks that share a layer
(tensor parallelism) do with it: outputs stay where they are, products of cut inputs are added.
T rows of activations, O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from layers.context import StepContext
from layers.parameters import declare, parameter
from layers.weights import ParamSpec
from quant.activations import Maximum, int8_product, own
from quant.packed import PackedLinear
from quant.row_parts import RowParts
from quant.sections import cut_rows


class Linear(nn.Module):
    """x [T, I] -> [T, O]. Declares one meta parameter for each tensor that the scheme stores, and `bias` if any."""

    def __init__(self, weight: ParamSpec, bias: ParamSpec | None = None) -> None:
        super().__init__()
        declare(self, weight)
        if bias is not None:
            declare(self, bias)
        self.scheme, self.dtype, self.param_name = weight.scheme, weight.dtype, weight.name
        self.sections = weight.section_rows
        self._kept_rows = weight.kept_rows
        self._stored_names = tuple(weight.storage())
        self._has_bias = bias is not None
        self.packed: PackedLinear | None = None  # given by the runtime; used in steps that ask for it

    def stored(self) -> dict[str, torch.Tensor]:
        """The weight's stored tensors by name, without the bias."""
        return {name: parameter(self, name) for name in self._stored_names}

    def product(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x [T, I] -> [T, O], all sections side by side."""
        ctx.check()
        bias = parameter(self, "bias") if self._has_bias else None
        if ctx.packed and self.packed is not None and not ctx.int8_activations:
            out = self.packed.linear(x, bias)
            if out is not None:
                return out
        if ctx.int8_activations:
            return int8_product(x, lambda codes: self._wide_product(codes, None, ctx), bias, maximum=self._maximum(ctx))
        return self._wide_product(x, bias, ctx)

    def _maximum(self, ctx: StepContext) -> Maximum:
        """Over the ranks that have the other features of the layer's input: this one has all of them."""
        return own

    def _wide_product(self, x: torch.Tensor, bias: torch.Tensor | None, ctx: StepContext) -> torch.Tensor:
        if ctx.weights is None:
            return self.scheme.linear(x, self.stored(), self._kept_rows, bias, kernels=ctx.kernels)
        with ctx.weights.lease(self.param_name) as leased:
            if isinstance(leased, RowParts):
                return ctx.kernels.wide(x, leased, bias)
            stored = self.stored() if leased is None else leased
            return self.scheme.linear(x, stored, self._kept_rows, bias, kernels=ctx.kernels)


class QKVParallelLinear(Linear):
    """The fused query, key and value projection."""

    def forward(self, x: torch.Tensor, ctx: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, I] -> queries and keys side by side [T, q_rows + kv_rows], and v [T, kv_rows]: views of one product."""
        product, of_qk = self.product(x, ctx), self.sections[0] + self.sections[1]
        return product[:, :of_qk], product[:, of_qk:]


class MergedColumnParallelLinear(Linear):
    """Several projections of the same input fused into one: gate and up."""

    def forward(self, x: torch.Tensor, ctx: StepContext) -> tuple[torch.Tensor, ...]:
        """x [T, I] -> one [T, rows] view for each section."""
        return torch.split(self.product(x, ctx), list(self.sections), dim=-1)


class ColumnParallelLinear(Linear):
    """One projection away from the hidden size."""

    def forward(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x [T, I] -> [T, O]."""
        return self.product(x, ctx)


class RowParallelLinear(Linear):
    """A projection back to the hidden size. Where its inputs are cut over ranks, each has a part of the sum; the bias,
    if any, is with the first of them alone."""

    def __init__(self, weight: ParamSpec, bias: ParamSpec | None = None) -> None:
        super().__init__(weight, bias)
        self.is_part = is_part_of_sum(weight)

    def forward(self, x: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """x [T, I], this rank's inputs -> [T, O], the sum over all ranks."""
        return self.summed(self.product(x, ctx), ctx)

    def _maximum(self, ctx: StepContext) -> Maximum:
        return ctx.groups.tensor.maximum if self.is_part else own

    def summed(self, product: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """The sum of all ranks' products [T, O]."""
        return ctx.groups.tensor.all_reduce(product) if self.is_part else product


def is_part_of_sum(weight: ParamSpec) -> bool:
    """Whether products with this weight are one rank's part of a sum: it has some of the columns."""
    return weight.cut is not None and weight.cut.columns is not None


def stored_rows(
    stored: Mapping[str, torch.Tensor], *, row_multiple: int, start: int, stop: int
) -> dict[str, torch.Tensor]:
    """Views of the stored tensors for rows [start, stop) of a weight of one section (see quant.sections.cut_rows)."""
    return cut_rows(stored, rows=stored["weight"].shape[0], multiple=row_multiple, start=start, stop=stop)

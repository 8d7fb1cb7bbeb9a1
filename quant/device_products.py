"""Products of stored weights on a device other than the CPU: the chosen kernel, or strips of wide numbers.

x [..., I], weight [O, ...], results [..., O] in x's dtype; sums are float32. Kernels are imported when one first runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quant.device_choice import DeviceProduct, ProductShape, StoredForm, choose_product
from quant.device_features import DeviceFeatures
from quant.products import on_device
from quant.scaled_products import scaled_rows, scaled_sums

Widen = Callable[[int, int], torch.Tensor]  # float32 numbers of rows [start, stop)


@dataclass(frozen=True)
class OnDevice:
    """The products for one device. `round_activations`: they may be rounded to 8 bits where that is faster."""

    features: DeviceFeatures
    round_activations: bool = False

    def float8_rows(
        self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, *, widen: Widen
    ) -> torch.Tensor:
        """weight e4m3fn (or e4m3fnuz, on devices of that) [O, I], scale float32 [O], perhaps one number expanded."""
        native = (weight.dtype == torch.float8_e4m3fnuz) is self.features.fnuz
        product = self._choose(StoredForm.FLOAT8_ROWS if native else StoredForm.OTHER, x, weight.shape[0])
        rows = _rows(x)
        if product is DeviceProduct.STRIPS:
            return on_device(x, weight, bias, widen)
        if product is DeviceProduct.TRITON:
            one = scale.stride(0) == 0
            found = self._float8(rows, weight, scale[:1] if one else scale, bias, weight.shape[0] if one else 1, 0)
        elif product is DeviceProduct.SCALED_ROWS:
            found = scaled_rows(rows, weight, scale, bias)
        else:
            found = scaled_sums(rows, weight, scale, bias)
        return found.view(*x.shape[:-1], weight.shape[0])

    def float8_blocks(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        block: tuple[int, int],
        widen: Widen,
    ) -> torch.Tensor:
        """weight e4m3fn [O, I] of one section, scale float32 or e8m0 [ceil(O / block 0), ceil(I / block 1)]."""
        if self._choose(StoredForm.FLOAT8_BLOCKS, x, weight.shape[0], block[1]) is DeviceProduct.STRIPS:
            return on_device(x, weight, bias, widen)
        found = self._float8(_rows(x), weight, scale, bias, *block)
        return found.view(*x.shape[:-1], weight.shape[0])

    def _float8(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        rows_per_scale: int,
        columns_per_scale: int,
    ) -> torch.Tensor:
        from quant.triton.float8 import multiply_float8

        return multiply_float8(
            rows, weight, scale, bias,
            rows_per_scale=rows_per_scale, columns_per_scale=columns_per_scale or rows.shape[1],
            native=self.features.at_least(8, 9),
        )  # fmt: skip

    def small_floats(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        row_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        *,
        block: int,
        widen: Widen,
    ) -> torch.Tensor:
        """weight e4m3fn [O, I], or e2m1 in uint8 [O, ceil(I / 2)]; scale e8m0 or e4m3fn [O, ceil(I / block)]; row_scale
        float32 [O] multiplies whole rows of an e2m1 weight (so does `widen`)."""
        if weight.dtype == torch.float8_e4m3fn and row_scale is None:
            return self.float8_blocks(x, weight, scale, bias, block=(1, block), widen=widen)
        nibbles = weight.dtype == torch.uint8
        form = StoredForm.FLOAT4 if nibbles else StoredForm.OTHER
        if self._choose(form, x, weight.shape[0], block) is DeviceProduct.STRIPS:
            return on_device(x, weight, bias, widen)
        from quant.triton.float4 import multiply_float4

        found = multiply_float4(_rows(x), weight, scale, row_scale, bias, block=block)
        return found.view(*x.shape[:-1], weight.shape[0])

    def integers(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | int,
        bias: torch.Tensor | None,
        *,
        bits: int,
        group: torch.Tensor | int,
        widen: Widen,
    ) -> torch.Tensor:
        """weight uint8 codes of 4 bits, uint8 or int8 of 8; scale [O, groups]; zero uint8 [O, groups], or one code for
        all; group: its size (0: the row), or the group of each input."""
        in_order = isinstance(group, torch.Tensor)
        form = StoredForm.OTHER if in_order else StoredForm.INTEGERS
        size = 0 if isinstance(group, torch.Tensor) else group
        if self._choose(form, x, weight.shape[0], size) is DeviceProduct.STRIPS:
            return on_device(x, weight, bias, widen)
        from quant.triton.integers import multiply_integers

        found = multiply_integers(_rows(x), weight, scale, zero, bias, bits=bits, group_size=size)
        return found.view(*x.shape[:-1], weight.shape[0])

    def _choose(self, form: StoredForm, x: torch.Tensor, outputs: int, columns_per_scale: int = 0) -> DeviceProduct:
        inputs = x.shape[-1]
        tokens = x.numel() // inputs if inputs else 0
        shape = ProductShape(tokens, outputs, inputs, x.dtype, columns_per_scale)
        return choose_product(form, shape, features=self.features, round_activations=self.round_activations)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()

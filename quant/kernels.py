"""Which matmul runs: a function of scheme, rows of x, dtype, device, CPU features and mode, never of what has finished.

On a CPU every product is cut into panels of output rows (quant.panels), so its bits do not depend on threads. A panel
is computed in one of three ways: straight on the weight as it is stored; strip by strip, expanded into a small reused
buffer; or by torch's int8 product. Measured (BENCHMARKS.md has the table): bfloat16 products are fastest straight where
the CPU has instructions for them, and 4 to 7 times slower than strips widened to float32 where it has none.

T rows of x, O output rows, I input features. x [..., I] and the result [..., O] have one dtype; sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch
import torch.nn.functional as F

from quant.cpu_features import CpuFeatures
from quant.float8_blocks import BLOCK, multiply_blocks, scale_by_number
from quant.float8_codec import expand
from quant.panels import InOrder, Panel, RunPanels, Workspace, panel_bounds, strip_bounds

STRIP_ROWS = 5  # rows of x from which widening a weight pays, where bfloat16 has no instructions of its own
INT8_ROWS = 16  # rows of x up to which torch's int8 product is the fastest

# Writes the numbers of weight rows [start, stop) into a strip buffer [stop - start, I].
Expand = Callable[[int, int, torch.Tensor, Workspace], None]


class KernelMode(Enum):
    """How freely a matmul may be chosen."""

    DEFAULT = "default"  # the fastest that works on what is stored, as it arrives
    FAST = "fast"  # packed and low-precision forms from a fixed token on: other bits than DEFAULT
    EXACT = "exact"  # the reference: the weight widened to float32, and a float32 product


@dataclass(frozen=True)
class Kernels:
    """The choice of matmuls for one model. `run` runs panels, possibly on several threads; one caller at a time."""

    mode: KernelMode = KernelMode.DEFAULT
    features: CpuFeatures = field(default_factory=CpuFeatures)
    run: RunPanels = field(default_factory=InOrder)

    @classmethod
    def detect(cls, *, mode: KernelMode = KernelMode.DEFAULT, run: RunPanels | None = None) -> Kernels:
        """Kernels for this machine."""
        return cls(mode, CpuFeatures.detect(), run or InOrder())

    def wide(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """weight [O, I] in a wide dtype."""
        if x.device.type != "cpu":
            return F.linear(x, weight.to(x.dtype), bias)
        rows = x.reshape(-1, x.shape[-1])
        if self._straight(rows, weight):
            return self._by_panel(x, weight, bias, self._straight_panel)

        def widen(start: int, stop: int, out: torch.Tensor, workspace: Workspace) -> None:
            out.copy_(weight[start:stop])

        return self._by_strip(x, weight, bias, widen, None, dtype=torch.float32)

    def _straight(self, rows: torch.Tensor, weight: torch.Tensor) -> bool:
        if weight.dtype == torch.float32 or rows.dtype != weight.dtype:
            return weight.dtype == rows.dtype
        if self.mode is KernelMode.EXACT:
            return False
        native = self.features.native_bf16 and weight.dtype == torch.bfloat16
        return native or rows.shape[0] < STRIP_ROWS

    def int8(
        self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """weight int8 [O, I], scale float32 [O]."""
        if x.device.type != "cpu":
            return F.linear(x, (weight.float() * scale.unsqueeze(1)).to(x.dtype), bias)
        rows = x.numel() // x.shape[-1]
        packed = weight.shape[1] % 16 == 0 and x.dtype != torch.float32 and rows <= INT8_ROWS
        if packed and self.mode is not KernelMode.EXACT:
            return self._by_panel(x, weight, bias, _int8_panel(scale))

        def widen(start: int, stop: int, out: torch.Tensor, workspace: Workspace) -> None:
            out.copy_(weight[start:stop])

        return self._by_strip(x, weight, bias, widen, scale, dtype=self._strip_dtype(x))

    def float8(
        self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """weight e4m3fn [O, I], scale float32 [O]."""
        if x.device.type != "cpu":
            return F.linear(x, (weight.float() * scale.unsqueeze(1)).to(x.dtype), bias)

        def widen(start: int, stop: int, out: torch.Tensor, workspace: Workspace) -> None:
            expand(weight[start:stop], out, workspace)

        factor = expand(weight[:1, :1], torch.empty(1, 1), Workspace())
        return self._by_strip(x, weight, bias, widen, scale * factor, dtype=self._strip_dtype(x))

    def float8_blocks(
        self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """weight e4m3fn [O, I] of one section, scale float32 [ceil(O/128), ceil(I/128)]."""
        if x.device.type != "cpu":
            return F.linear(x, (weight.float() * scale_by_number(scale, weight.shape)).to(x.dtype), bias)
        factor = expand(weight[:1, :1], torch.empty(1, 1), Workspace())
        factors = scale * factor

        def widen(start: int, stop: int, out: torch.Tensor, workspace: Workspace) -> None:
            single = out.dtype == torch.float32
            wide = out if single else workspace.take("blocks", tuple(out.shape), torch.float32)
            expand(weight[start:stop], wide, workspace)
            for row in range(start, stop, BLOCK):
                multiply_blocks(wide[row - start : min(row + BLOCK, stop) - start], factors[row // BLOCK])
            if not single:
                out.copy_(wide)

        return self._by_strip(x, weight, bias, widen, None, dtype=self._strip_dtype(x))

    def _strip_dtype(self, x: torch.Tensor) -> torch.dtype:
        native = self.features.native_bf16 and x.dtype == torch.bfloat16 and self.mode is not KernelMode.EXACT
        return torch.bfloat16 if native else torch.float32

    # --- panels

    def _by_panel(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, compute: _PanelProduct
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty(rows.shape[0], weight.shape[0], dtype=x.dtype)
        bounds = panel_bounds(weight.shape[0], weight.shape[1] * weight.element_size())
        self.run([_bound(compute, rows, weight, bias, out, start, stop) for start, stop in bounds])
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def _straight_panel(
        rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, start: int, stop: int
    ) -> None:
        part = None if bias is None else bias[start:stop]
        out[:, start:stop] = F.linear(rows, weight[start:stop], part)

    def _by_strip(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        widen: Expand,
        scale: torch.Tensor | None,
        *,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Panels expanded strip by strip into `dtype`; scale [O] and bias are applied to the float32 product."""
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        out = torch.empty(rows.shape[0], weight.shape[0], dtype=x.dtype)
        in_features = weight.shape[1]

        def panel(start: int, stop: int) -> Panel:
            def compute(workspace: Workspace) -> None:
                for first, last in strip_bounds(start, stop, in_features=in_features, itemsize=dtype.itemsize):
                    strip = workspace.take("strip", (last - first, in_features), dtype)
                    widen(first, last, strip, workspace)
                    product = F.linear(rows, strip).float()
                    if scale is not None:
                        product *= scale[first:last]
                    if bias is not None:
                        product += bias[first:last]
                    out[:, first:last] = product

            return compute

        bounds = panel_bounds(weight.shape[0], in_features * weight.element_size())
        self.run([panel(start, stop) for start, stop in bounds])
        return out.view(*x.shape[:-1], weight.shape[0])


_PanelProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, int, int], None]


def _bound(
    compute: _PanelProduct,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    start: int,
    stop: int,
) -> Panel:
    return lambda workspace: compute(rows, weight, bias, out, start, stop)


def _int8_panel(scale: torch.Tensor) -> _PanelProduct:
    def compute(
        rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, start: int, stop: int
    ) -> None:
        # The op multiplies in the dtype of x; scales would be rounded to it, so they are applied here in float32.
        ones = torch.ones(stop - start, dtype=rows.dtype)
        product = torch._weight_int8pack_mm(rows, weight[start:stop], ones).float() * scale[start:stop]
        if bias is not None:
            product += bias[start:stop]
        out[:, start:stop] = product

    return compute

"""Which matmul runs: a function of scheme, rows of x, dtype, device, CPU features and mode, never of what has finished.

On a CPU products are cut into panels of output rows (quant.panels), so their bits do not depend on threads. Measured
(examples/bench_kernels.py prints the table): bfloat16 products are fastest straight where the CPU has instructions for
them, and 4 to 7 times slower than strips widened to float32 where it has none; torch's int8 product is the fastest for
few rows of bfloat16, and tens of times slower than strips for float16 and float32.

T rows of x, O output rows, I input features. x [..., I] and the result [..., O] have one dtype; sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from math import lcm

import torch
import torch.nn.functional as F

from quant.cpu_features import CpuFeatures
from quant.device_features import DeviceFeatures, triton_installed
from quant.device_products import OnDevice
from quant.float8 import BLOCK
from quant.float8_blocks import scale_by_number
from quant.float8_codec import expand, expansion
from quant.int4_strips import IntGroups
from quant.mx_codec import multiply_blocks
from quant.mx_strips import ScaledBlocks
from quant.nf4_strips import CodedBlocks
from quant.panel_bounds import ROW_MULTIPLE
from quant.panels import InOrder, RunPanels, Workspace
from quant.products import INT8_MULTIPLE, Expand, int8_rows, on_device, one_row, straight, stripwise, turned
from quant.row_parts import RowParts, Rows

STRIP_ROWS = 4  # rows of x from which widening a weight pays, where half precision has no instructions of its own
NATIVE_ROWS = 16  # rows of x from which strips in bfloat16 are faster than in float32, where it has instructions
GROUPS_NATIVE_ROWS = 64  # the same for codes in groups or blocks, which are widened by way of float32
TURNED_ROWS = 128  # rows of x up to which bfloat16 is faster with the weight on the left, where it has instructions
LARGEST_BLOCK = 1024  # rows of a block of scales that a panel is made of whole ones of
INT8_ROWS = 15  # rows of x up to which torch's int8 product is the fastest


class KernelMode(Enum):
    """How freely a matmul may be chosen."""

    DEFAULT = "default"  # the fastest that works on what is stored, as it arrives
    FAST = "fast"  # also 8-bit activations: packed forms (quant.packed) from a fixed token on, float8 products on a GPU
    EXACT = "exact"  # the reference: the weight widened to float32, and a float32 product


@dataclass(frozen=True)
class Kernels:
    """The choice of matmuls for one model. `run` runs panels, possibly on several threads; one caller at a time."""

    mode: KernelMode = KernelMode.DEFAULT
    features: CpuFeatures = field(default_factory=CpuFeatures)
    run: RunPanels = field(default_factory=InOrder)
    triton: bool = field(default_factory=triton_installed)

    @classmethod
    def detect(cls, *, mode: KernelMode = KernelMode.DEFAULT, run: RunPanels | None = None) -> Kernels:
        """Kernels for this machine."""
        return cls(mode, CpuFeatures.detect(), run or InOrder())

    def wide(self, x: torch.Tensor, weight: Rows, bias: torch.Tensor | None) -> torch.Tensor:
        """weight [O, I] in a wide dtype; in several places on the CPU alone."""
        if not isinstance(weight, RowParts) and x.device.type != "cpu":
            return F.linear(x, weight.to(x.dtype), bias)
        rows = _rows(x)
        if not self._straight(rows, weight):
            out = stripwise(rows, weight, _copied(weight), None, bias, dtype=torch.float32, run=self.run)
        elif rows.shape[0] == 1 and weight.dtype == torch.bfloat16:
            out = one_row(rows, weight, bias)
        elif rows.shape[0] <= TURNED_ROWS and weight.dtype == torch.bfloat16 and self.features.native_bf16:
            out = turned(rows, weight, bias, run=self.run)
        else:
            out = straight(rows, weight, bias, run=self.run)
        return out.view(*x.shape[:-1], weight.shape[0])

    def _straight(self, rows: torch.Tensor, weight: Rows) -> bool:
        if weight.dtype in (torch.float32, torch.float64) or rows.dtype != weight.dtype:
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
            return self._on_device(x).integers(
                x, weight, scale.unsqueeze(1), 0, bias, bits=8, group=0, widen=_by_row_scale(weight, scale)
            )
        rows = _rows(x)
        if self._int8_rows(rows):
            out = int8_rows(rows, weight, scale, bias)
        else:
            out = stripwise(rows, weight, _copied(weight), scale, bias, dtype=self._strip_dtype(x), run=self.run)
        return out.view(*x.shape[:-1], weight.shape[0])

    def _int8_rows(self, rows: torch.Tensor) -> bool:
        # In float16 the sums of unscaled codes would overflow; in float32 the operator takes one number at a time.
        fitting = rows.dtype == torch.bfloat16 and rows.shape[0] <= INT8_ROWS and rows.shape[1] % INT8_MULTIPLE == 0
        return fitting and self.mode is not KernelMode.EXACT

    def float8(
        self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """weight e4m3fn [O, I], scale float32 [O]."""
        if x.device.type != "cpu":
            return self._on_device(x).float8_rows(x, weight, scale, bias, widen=_by_row_scale(weight, scale))

        def widen(start: int, stop: int, out: torch.Tensor, workspace: Workspace) -> None:
            expand(weight[start:stop], out, workspace)

        scale = scale * expansion(weight.dtype)
        out = stripwise(_rows(x), weight, widen, scale, bias, dtype=self._strip_dtype(x), run=self.run)
        return out.view(*x.shape[:-1], weight.shape[0])

    def float8_blocks(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        block: tuple[int, int] = (BLOCK, BLOCK),
    ) -> torch.Tensor:
        """weight e4m3fn [O, I] of one section, scale float32 [ceil(O / block 0), ceil(I / block 1)]."""
        if x.device.type != "cpu":
            widened = _by_block_scale(weight, scale, block)
            return self._on_device(x).float8_blocks(x, weight, scale, bias, block=block, widen=widened)
        factors = scale * expansion(weight.dtype)

        def widen(start: int, stop: int, out: torch.Tensor, workspace: Workspace) -> None:
            single = out.dtype == torch.float32
            wide = out if single else workspace.take("blocks", tuple(out.shape), torch.float32)
            expand(weight[start:stop], wide, workspace)
            if block[0] == 1:
                multiply_blocks(wide, factors[start:stop], block=block[1])
            for first, last in _block_rows(start, stop, block[0]) if block[0] > 1 else ():
                multiply_blocks(wide[first - start : last - start], factors[first // block[0], None], block=block[1])
            if not single:
                out.copy_(wide)

        dtype = self._strip_dtype(x)
        multiple = lcm(ROW_MULTIPLE, block[0]) if block[0] < LARGEST_BLOCK else ROW_MULTIPLE
        out = stripwise(_rows(x), weight, widen, None, bias, dtype=dtype, run=self.run, multiple=multiple)
        return out.view(*x.shape[:-1], weight.shape[0])

    def int4(self, x: torch.Tensor, groups: IntGroups, bias: torch.Tensor | None) -> torch.Tensor:
        """A weight of integer codes in groups of inputs (quant.int4_strips)."""
        if x.device.type != "cpu":
            return self._on_device(x).integers(
                x, groups.weight, groups.scale, groups.zero, bias,
                bits=groups.bits, group=groups.group, widen=groups.on_device(x.shape[-1]),
            )  # fmt: skip
        dtype = self._strip_dtype(x, least_rows=GROUPS_NATIVE_ROWS)
        out = stripwise(_rows(x), groups.weight, groups.widen, None, bias, dtype=dtype, run=self.run)
        return out.view(*x.shape[:-1], groups.weight.shape[0])

    def microscaled(self, x: torch.Tensor, blocks: ScaledBlocks, bias: torch.Tensor | None) -> torch.Tensor:
        """A weight of small floats in blocks of inputs that share a scale (quant.mx_strips)."""
        if x.device.type != "cpu":
            return self._on_device(x).small_floats(
                x, blocks.weight, blocks.scale, blocks.row_scale, bias,
                block=blocks.block, widen=blocks.on_device(x.shape[-1]),
            )  # fmt: skip
        dtype, scale = self._strip_dtype(x, least_rows=GROUPS_NATIVE_ROWS), blocks.row_scale
        out = stripwise(_rows(x), blocks.weight, blocks.widen, scale, bias, dtype=dtype, run=self.run)
        return out.view(*x.shape[:-1], blocks.weight.shape[0])

    def coded(self, x: torch.Tensor, blocks: CodedBlocks, bias: torch.Tensor | None) -> torch.Tensor:
        """A weight of codes for 16 numbers in blocks (quant.nf4_strips)."""
        if x.device.type != "cpu":
            return on_device(x, blocks.weight, bias, blocks.numbers)
        dtype = self._strip_dtype(x, least_rows=GROUPS_NATIVE_ROWS)
        out = stripwise(_rows(x), blocks.weight, blocks.widen, None, bias, dtype=dtype, run=self.run)
        return out.view(*x.shape[:-1], blocks.weight.shape[0])

    def _on_device(self, x: torch.Tensor) -> OnDevice:
        """Products on x's device. EXACT knows nothing of it, so that everything goes through strips."""
        if self.mode is KernelMode.EXACT:
            return OnDevice(DeviceFeatures())
        features = DeviceFeatures.detect(x.device, triton=self.triton)
        return OnDevice(features, round_activations=self.mode is KernelMode.FAST)

    def _strip_dtype(self, x: torch.Tensor, *, least_rows: int = NATIVE_ROWS) -> torch.dtype:
        """What a quantized weight is widened to. bfloat16 holds every code of int8 and of float8 exactly."""
        native = self.features.native_bf16 and x.dtype == torch.bfloat16 and self.mode is not KernelMode.EXACT
        return torch.bfloat16 if native and x.numel() >= least_rows * x.shape[-1] else torch.float32


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _copied(weight: Rows) -> Expand:
    def widen(start: int, stop: int, out: torch.Tensor, workspace: Workspace) -> None:
        out.copy_(weight[start:stop])

    return widen


def _by_row_scale(weight: torch.Tensor, scale: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
    return lambda start, stop: weight[start:stop].float().mul_(scale[start:stop].unsqueeze(1))


def _block_rows(start: int, stop: int, height: int) -> Iterator[tuple[int, int]]:
    """The runs of rows [start, stop) that lie in one block each."""
    while start < stop:
        end = min(stop, (start // height + 1) * height)
        yield start, end
        start = end


def _by_block_scale(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]
) -> Callable[[int, int], torch.Tensor]:
    def widen(start: int, stop: int) -> torch.Tensor:
        first = start // block[0]
        shape = torch.Size((stop - first * block[0], weight.shape[1]))
        scales = scale_by_number(scale[first : -(-stop // block[0])], shape, block=block)
        return weight[start:stop].float().mul_(scales[start - first * block[0] :])

    return widen

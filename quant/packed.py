"""Packed copies of stored weights for `KernelMode.FAST`: faster for one row of activations, with other bits.

Only int8_per_channel has one: FBGEMM's layout, whose product multiplies int8 by int8 with sums in int32, after rounding
the row of activations to 8 bits (7 where the CPU lacks the instructions that keep such sums from overflowing). It reads
a weight 1.5 to 2 times as fast as the default, and is packed at 0.1 to 0.3 GB/s a thread: too slow to be done on a
weight's way in.

The other schemes are the same under "fast" as under "default". Their candidate, FBGEMM's float16 form, is slower at one
row than the bfloat16 product where the CPU has instructions for that; where it has none it would double the memory to
save a quarter of the time.

A row by itself decides its rounding, so products of more rows are left to the stored weight: rows of one product would
share one rounding, and a sequence's tokens would depend on what else is in the batch. Imports no torch. [no-torch]
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from quant.int8 import Int8PerChannel
from quant.scheme import Scheme
from quant.sections import total_rows

if TYPE_CHECKING:
    import torch

    from quant.kernels import Kernels
    from quant.panels import Panel, Workspace

# What FBGEMM was seen to take for a panel: columns and rows padded to such multiples, a scale, a zero point and an
# offset for each row, and what the allocator rounds up.
_K_MULTIPLE, _N_MULTIPLE, _ROW_NBYTES, _PANEL_NBYTES = 128, 32, 32, 1 << 16


@dataclass(frozen=True)
class PackedLinear:
    """A weight [O, I] as packed panels of rows: (start, stop, FBGEMM's object)."""

    panels: tuple[tuple[int, int, Any], ...]
    shape: tuple[int, int]
    reduce_range: bool

    @property
    def nbytes(self) -> int:
        """Bytes that the copy takes at the most."""
        return sum(_panel_nbytes(stop - start, self.shape[1]) for start, stop, _ in self.panels)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, *, kernels: Kernels) -> torch.Tensor | None:
        """x [..., I] -> [..., O] in x's dtype, or None where x is not one row of finite numbers (nor of a finite sum).

        The bits do not depend on threads: the sums are integers.
        """
        if x.numel() != self.shape[1]:
            return None
        row = x.reshape(1, self.shape[1]).float()
        if not isfinite(row.sum()):  # the operator refuses what has no largest or no smallest number
            return None
        out = x.new_empty(1, self.shape[0])
        kernels.run([self._panel(row, bias, out, *each) for each in self.panels])
        return out.view(*x.shape[:-1], self.shape[0])

    def _panel(
        self, row: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, start: int, stop: int, packed: Any
    ) -> Panel:
        import torch

        def compute(workspace: Workspace) -> None:
            sums = torch.ops.quantized.linear_dynamic(row, packed, self.reduce_range)
            out[:, start:stop] = sums if bias is None else sums + bias[start:stop]

        return compute


def packed_nbytes(scheme: Scheme, sections: tuple[int, ...], in_features: int) -> int:
    """Bytes that `pack` will take for such a weight at the most; 0 where the scheme has no packed form."""
    if not isinstance(scheme, Int8PerChannel):
        return 0
    from quant.panel_bounds import panel_bounds

    bounds = panel_bounds(total_rows(sections), in_features)
    return sum(_panel_nbytes(stop - start, in_features) for start, stop in bounds)


def _panel_nbytes(rows: int, columns: int) -> int:
    padded = -(-rows // _N_MULTIPLE) * _N_MULTIPLE
    return padded * (-(-columns // _K_MULTIPLE) * _K_MULTIPLE + _ROW_NBYTES) + _PANEL_NBYTES


def pack(
    scheme: Scheme, stored: Mapping[str, torch.Tensor], sections: tuple[int, ...], *, kernels: Kernels
) -> PackedLinear | None:
    """A packed copy of a stored weight, made panel by panel on the threads of `kernels`; the stored one is only read.

    None where there is no packed form: for other schemes, devices other than CPUs, and builds of torch without FBGEMM.
    """
    import torch

    from quant.panel_bounds import panel_bounds

    weight = stored["weight"]
    if not isinstance(scheme, Int8PerChannel) or weight.device.type != "cpu":
        return None
    if torch.backends.quantized.engine not in ("fbgemm", "x86"):  # x86 takes FBGEMM for linear layers
        return None
    packed: dict[tuple[int, int], Any] = {}

    def panel(start: int, stop: int) -> Panel:
        def compute(workspace: Workspace) -> None:
            packed[start, stop] = _prepacked(weight[start:stop], stored["weight_scale"][start:stop])

        return compute

    with _deprecation_ignored():
        kernels.run([panel(*bounds) for bounds in panel_bounds(*weight.shape)])
    panels = tuple((start, stop, made) for (start, stop), made in sorted(packed.items(), key=lambda item: item[0]))
    return PackedLinear(panels, (weight.shape[0], weight.shape[1]), reduce_range=not kernels.features.vnni)


def _prepacked(weight: torch.Tensor, scale: torch.Tensor) -> Any:
    import torch

    zeros = torch.zeros(weight.shape[0], dtype=torch.int64)
    quantized = torch._make_per_channel_quantized_tensor(weight, scale.double(), zeros, 0)
    return torch.ops.quantized.linear_prepack(quantized, None)


@contextmanager
def _deprecation_ignored() -> Iterator[None]:
    """torch 2.13 announces, once, that tensors of quantized dtypes will go; FBGEMM's packing takes no other."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
        yield

"""Packed copies of stored weights for `KernelMode.FAST`: faster for few rows of activations, with other bits.

int8_per_channel has FBGEMM's layout, whose product multiplies int8 by int8 with sums in int32, after rounding the row
of activations to 8 bits (7 where the CPU lacks the instructions that keep such sums from overflowing). It reads a
weight 1.5 to 2 times as fast as the default, and is packed at 0.1 to 0.3 GB/s a thread: too slow to be done on a
weight's way in. int4_per_group has the tiles of torch's int4 product (quant.tiled_int4), ten times as fast at one row;
on a GPU too, in another order (quant.tiled_int4_device), and it is the only scheme with a packed form there.

The other schemes are the same under "fast" as under "default". Their candidate, FBGEMM's float16 form, is slower at one
row than the bfloat16 product where the CPU has instructions for that; where it has none it would double the memory to
save a quarter of the time.

A row by itself decides its rounding in FBGEMM's layout, so products of more rows are left to the stored weight: rows of
one product would share one rounding, and a sequence's tokens would depend on what else is in the batch. Imports no
torch. [no-torch]
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol

from quant import tiled_int4_device
from quant.dtypes import DType
from quant.int4 import IntPerGroup
from quant.int8 import Int8PerChannel
from quant.scheme import Scheme
from quant.sections import total_rows
from quant.tiled_int4 import is_tileable, most_rows, tile, tiled_nbytes

if TYPE_CHECKING:
    import torch

    from quant.kernels import Kernels
    from quant.panels import Panel, Workspace

# What FBGEMM was seen to take: columns and rows padded to such multiples, a scale, a zero point and an offset for each
# row, and what the allocator rounds up.
_K_MULTIPLE, _N_MULTIPLE, _ROW_NBYTES, _REST_NBYTES = 128, 32, 32, 1 << 16


class PackedLinear(Protocol):
    """A packed copy of a weight [O, I]."""

    @property
    def nbytes(self) -> int:
        """Bytes that the copy takes at the most."""
        ...

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """x [..., I] -> [..., O] in x's dtype, or None where such an x is left to the stored weight."""
        ...


@dataclass(frozen=True)
class FbgemmLinear:
    """A weight [O, I] as FBGEMM's object."""

    packed: Any
    shape: tuple[int, int]
    reduce_range: bool

    @property
    def nbytes(self) -> int:
        """Bytes that the copy takes at the most."""
        return _nbytes(*self.shape)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """x [..., I] -> [..., O] in x's dtype, or None where x is not one row of finite numbers (nor of a finite sum).

        Runs on torch's own threads: the sums are integers, so the bits do not depend on how many there are, and there
        is no need for panels, each of which would round the row again.
        """
        import torch

        if x.numel() != self.shape[1]:
            return None
        row = x.reshape(1, self.shape[1]).float()
        if not isfinite(row.sum()):  # the operator refuses what has no largest or no smallest number
            return None
        sums: torch.Tensor = torch.ops.quantized.linear_dynamic(row, self.packed, self.reduce_range)
        if bias is not None:
            sums += bias
        return sums.to(x.dtype).view(*x.shape[:-1], self.shape[0])


def reads_packed(scheme: Scheme, activations: DType) -> bool:
    """Whether the product of the scheme's packed form takes activations of this dtype: for others none need be made."""
    return activations is DType.BF16 or not isinstance(scheme, IntPerGroup)


def packed_nbytes(scheme: Scheme, sections: tuple[int, ...], in_features: int, *, device: str = "cpu") -> int:
    """Bytes that `pack` will take for such a weight at the most; 0 where the scheme has no packed form on a device of
    this kind ("cpu", "cuda"). Which GPU it is, is not asked: an old one makes no copies."""
    rows = total_rows(sections)
    if device != "cpu":
        if isinstance(scheme, IntPerGroup) and tiled_int4_device.is_tileable(scheme, rows, in_features):
            return tiled_nbytes(scheme, rows, in_features)
        return 0
    if isinstance(scheme, IntPerGroup) and is_tileable(scheme, rows, in_features):
        return tiled_nbytes(scheme, rows, in_features)
    return _nbytes(rows, in_features) if isinstance(scheme, Int8PerChannel) else 0


def _nbytes(rows: int, columns: int) -> int:
    padded = -(-rows // _N_MULTIPLE) * _N_MULTIPLE
    return padded * (-(-columns // _K_MULTIPLE) * _K_MULTIPLE + _ROW_NBYTES) + _REST_NBYTES


def pack(
    weights: Sequence[tuple[Scheme, Mapping[str, torch.Tensor]]], *, kernels: Kernels
) -> list[PackedLinear | None]:
    """Packed copies of weights (scheme, stored tensors), made on the threads of `kernels`; the stored stay.

    None where there is no packed form: for other schemes, for sizes that the int4 product does not take, CPUs on which
    it is slow and devices that have none, and for int8 in builds of torch without FBGEMM and on other devices. A
    device's copies are made in its current stream.
    """
    found: list[PackedLinear | None] = [_packed_on_device(*weight) for weight in weights]

    def panel(index: int, scheme: Scheme, stored: Mapping[str, torch.Tensor]) -> Panel:
        def compute(workspace: Workspace) -> None:
            found[index] = _packed(scheme, stored, kernels)

        return compute

    with _deprecation_ignored():
        kernels.run([panel(index, *weight) for index, weight in enumerate(weights) if _packs(*weight)])
    return found


def _packed_on_device(scheme: Scheme, stored: Mapping[str, torch.Tensor]) -> PackedLinear | None:
    from quant.device_features import DeviceFeatures

    weight = stored["weight"]
    if weight.device.type == "cpu" or not isinstance(scheme, IntPerGroup):
        return None
    features = DeviceFeatures.detect(weight.device, triton=False)
    rows, width = weight.shape
    if not (tiled_int4_device.has_tiled_product(features) and tiled_int4_device.is_tileable(scheme, rows, 2 * width)):
        return None
    return tiled_int4_device.tile(stored, group_size=scheme.group_size)


def _packs(scheme: Scheme, stored: Mapping[str, torch.Tensor]) -> bool:
    import torch

    if stored["weight"].device.type != "cpu":
        return False
    if isinstance(scheme, IntPerGroup):
        rows, width = stored["weight"].shape
        return most_rows() > 0 and is_tileable(scheme, rows, 2 * width)
    engine = torch.backends.quantized.engine in ("fbgemm", "x86")  # x86 takes FBGEMM for linear layers
    return engine and isinstance(scheme, Int8PerChannel)


def _packed(scheme: Scheme, stored: Mapping[str, torch.Tensor], kernels: Kernels) -> PackedLinear:
    if isinstance(scheme, IntPerGroup):
        return tile(stored, group_size=scheme.group_size)
    rows, columns = stored["weight"].shape
    return FbgemmLinear(_prepacked(**stored), (rows, columns), not kernels.features.vnni)


def _prepacked(weight: torch.Tensor, weight_scale: torch.Tensor) -> Any:
    import torch

    zeros = torch.zeros(weight.shape[0], dtype=torch.int64)
    quantized = torch._make_per_channel_quantized_tensor(weight, weight_scale.double(), zeros, 0)
    return torch.ops.quantized.linear_prepack(quantized, None)


@contextmanager
def _deprecation_ignored() -> Iterator[None]:
    """torch 2.13 announces, once, that tensors of quantized dtypes will go; FBGEMM's packing takes no other."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
        yield

"""Four-bit codes in the tile order of torch's int4 product on an NVIDIA GPU, for `KernelMode.FAST`: a packed copy.

The twin of quant.tiled_int4: the same groups, the same bfloat16 scales and zeros, another order of codes. The operator
wants compute capability 8.0, bfloat16 activations, output rows in eights and inputs in whole runs of 8 tiles of 16
(aten/src/ATen/native/cuda/int4mm.cu in torch's sources). Its converter reads two codes a byte with the even input in
the *high* half, where the stored form has it in the low one. It sums in float32, and rows do not see each other.

Up to some 32 rows it is the fastest known (torchao publishes times on an A6000: level with a Triton product at 32 rows,
half as fast at 128); examples/gpu_check.py measures it against the products of the stored form.

O output rows, I input features, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.scheme import Scheme
from quant.tiled_int4 import even, has_tiled_form, scales_and_zeros, tiled_linear

if TYPE_CHECKING:
    import torch

    from quant.device_features import DeviceFeatures

INNER_TILES = 8  # tiles of inputs that lie together: 16 bytes for each lane to load
ROW_MULTIPLE, COLUMN_MULTIPLE = 8, 16 * INNER_TILES
MOST_ROWS = 32  # of activations; for more, products of the stored form are faster


@dataclass(frozen=True)
class Int4TiledOnDevice:
    """A weight [O, I]: codes int32 [O/8, I/128, 32, 4] in tiles, scales_and_zeros bfloat16 [G, O, 2]."""

    weight: torch.Tensor
    scales_and_zeros: torch.Tensor
    group_size: int

    @property
    def nbytes(self) -> int:
        """Bytes that the copy takes."""
        return self.weight.nbytes + self.scales_and_zeros.nbytes

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """x [..., I] -> [..., O], or None where x is not bfloat16 or has no rows or more than MOST_ROWS."""
        import torch

        def product(rows: torch.Tensor) -> torch.Tensor:
            return torch._weight_int4pack_mm(rows, self.weight, self.group_size, self.scales_and_zeros)

        columns = self.weight.shape[1] * COLUMN_MULTIPLE
        return tiled_linear(x, bias, columns=columns, most_rows=MOST_ROWS, product=product)


def has_tiled_product(features: DeviceFeatures) -> bool:
    """Whether a device has the product: NVIDIA's, from 8.0 on. AMD's order of tiles is another."""
    return features.at_least(8, 0)


def is_tileable(scheme: Scheme, rows: int, in_features: int) -> bool:
    """Whether `tile` takes such a weight. An odd number of inputs is taken for the next even one."""
    columns = even(in_features)
    fits = has_tiled_form(scheme) and columns % COLUMN_MULTIPLE == 0 and columns % scheme.group_size == 0
    return fits and rows % ROW_MULTIPLE == 0 and rows > 0 and columns > 0


def tile(stored: Mapping[str, torch.Tensor], *, group_size: int) -> Int4TiledOnDevice:
    """The tiled copy of a weight that `is_tileable`, on the weight's device; beside it one more of its codes is held
    while it is made."""
    import torch

    tiled = torch._convert_weight_to_int4pack(even_high(stored["weight"]), INNER_TILES)
    return Int4TiledOnDevice(tiled, scales_and_zeros(stored), group_size)


def even_high(weight: torch.Tensor) -> torch.Tensor:
    """Bytes of two codes with their halves exchanged: the even input's code in the high one."""
    return (weight << 4) | (weight >> 4)

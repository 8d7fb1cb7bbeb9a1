"""Four-bit codes in the tile order of torch's int4 product on a CPU, for `KernelMode.FAST`: a packed copy.

The product reads bfloat16 activations, 32, 64, 128 or 256 inputs a group, and a bfloat16 scale and zero for each; in
other dtypes it takes one number at a time. Its zero is a number and no code: (8 - zero point) * scale, which is rounded
to bfloat16 where the scheme is asymmetric. It sums in float32, each output by one thread, and rows do not see each
other. Measured, one thread of a CPU with AVX512: at one row it takes half the time of a bfloat16 product and a tenth
of strips', and beyond some 24 rows strips are faster (12 with AVX2).

O output rows, I input features, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeGuard

from quant.dtypes import DType
from quant.int4 import IntPerGroup
from quant.scheme import Scheme

if TYPE_CHECKING:
    import torch

ROW_MULTIPLE = 16  # of output rows: what the operator takes
GROUPS = (32, 64, 128, 256)  # inputs a group: what it takes
# Of activations, by what torch may use of the CPU: for more, strips of the stored form are faster. Without such vectors
# the operator takes a hundred times as long.
_MOST_ROWS: Mapping[str, int] = MappingProxyType({"AVX512": 24, "AVX2": 12})
_RUN_ROWS = 64  # tiled at once: a multiple of the tile's height, which is 64 at the most


@dataclass(frozen=True)
class Int4Tiled:
    """A weight [O, I]: codes uint8 [O, I/2] in tiles, scales_and_zeros bfloat16 [G, O, 2]."""

    weight: torch.Tensor
    scales_and_zeros: torch.Tensor
    group_size: int
    most_rows: int

    @property
    def nbytes(self) -> int:
        """Bytes that the copy takes."""
        return self.weight.nbytes + self.scales_and_zeros.nbytes

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """x [..., I] -> [..., O], or None where x is not bfloat16 or has no rows or more than `most_rows`."""
        import torch

        def product(rows: torch.Tensor) -> torch.Tensor:
            return torch._weight_int4pack_mm_for_cpu(rows, self.weight, self.group_size, self.scales_and_zeros)

        return tiled_linear(x, bias, columns=2 * self.weight.shape[1], most_rows=self.most_rows, product=product)


def tiled_linear(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    columns: int,
    most_rows: int,
    product: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor | None:
    """x [..., I] through a `product` of bfloat16 rows [T, columns] -> [..., O], bias added in float32; None where x is
    not bfloat16 or has no rows or more than `most_rows`."""
    import torch

    if x.shape[-1] == columns - 1:  # an odd number of inputs: the last high nibble is none
        x = torch.nn.functional.pad(x, (0, 1))
    if x.dtype is not torch.bfloat16 or not 0 < x.numel() <= most_rows * columns:
        return None
    out = product(x.reshape(-1, columns).contiguous())
    if bias is not None:
        out = out.float().add_(bias).to(x.dtype)
    return out.view(*x.shape[:-1], out.shape[-1])


def has_tiled_form(scheme: Scheme) -> TypeGuard[IntPerGroup]:
    """Whether the operators, on a CPU and on a GPU, read codes, groups and scales such as the scheme's."""
    return (
        isinstance(scheme, IntPerGroup)
        and scheme.bits == 4
        and scheme.group_size in GROUPS
        and scheme.scale_dtype is DType.BF16
        and not scheme.ordered
    )


def is_tileable(scheme: Scheme, rows: int, in_features: int) -> bool:
    """Whether `tile` takes such a weight. An odd number of inputs is taken for the next even one (`tiled_linear`)."""
    fits = has_tiled_form(scheme) and even(in_features) % scheme.group_size == 0
    return fits and rows % ROW_MULTIPLE == 0


def most_rows() -> int:
    """Rows of activations up to which the tiled product is the fastest on this CPU; 0 where it never is."""
    import torch

    return _MOST_ROWS.get(torch.backends.cpu.get_cpu_capability(), 0)


def tiled_nbytes(scheme: IntPerGroup, rows: int, in_features: int) -> int:
    """Bytes that the tiled copy takes, in either order of tiles."""
    return rows * even(in_features) // 2 + 4 * rows * (even(in_features) // scheme.group_size)


def even(number: int) -> int:
    """The number, or the next one that is even."""
    return number + number % 2


def tile(stored: Mapping[str, torch.Tensor], *, group_size: int) -> Int4Tiled:
    """The tiled copy of a weight that `is_tileable`, made from runs of rows, so that little is held beside it."""
    import torch

    from quant.int4_codec import codes_of

    weight = stored["weight"]
    tiled = torch.empty_like(weight)
    for start in range(0, weight.shape[0], _RUN_ROWS):
        codes = codes_of(weight[start : start + _RUN_ROWS], None, bits=4).int()
        # Whole tiles follow each other, so a run's are those of the whole weight.
        tiled[start : start + _RUN_ROWS] = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    return Int4Tiled(tiled, scales_and_zeros(stored), group_size, most_rows())


def scales_and_zeros(stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Scale and zero of each group, [G, O, 2] in the scales' dtype: number = (code - 8) * scale + zero."""
    import torch

    scale = stored["weight_scale"]
    zeros = torch.zeros_like(scale)
    if "weight_zero_point" in stored:
        zeros = (8 - stored["weight_zero_point"].float()).mul_(scale.float()).to(scale.dtype)
    return torch.stack((scale.t(), zeros.t()), 2).contiguous()

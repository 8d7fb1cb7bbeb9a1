"""Which product runs on a device: a function of what is stored, shapes, dtype, the device and what is allowed.

| product | reads | activations | where |
| --- | --- | --- | --- |
| SCALED_ROWS | e4m3 with a scale a row, by torch._scaled_mm | rounded to e4m3, a scale a token | only when allowed |
| SCALED_SUMS | the same, scales applied to its float32 sums | the same | only when allowed |
| TRITON | the stored codes, made numbers in registers | as they are | up to TRITON_TOKENS tokens |
| STRIPS | a copy of some rows, widened | as they are | everywhere |

Rounding activations changes results by more than the order of sums does, so it needs KernelMode.FAST. STRIPS writes and
reads some 20 bytes for each number of a weight, TRITON reads what is stored and nothing more; with many tokens that no
longer counts, and the library's product of wide numbers is the better one. Where they meet is an estimate, which
examples/gpu_check.py is there to measure. No product takes one scale for a fused weight of several: SCALED_SUMS gives
the operator ones and applies the parts' own scales to its sums (quant.joint_scale is for a product that would).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from quant.device_features import DeviceFeatures

TRITON_TOKENS = 512
TRITON_DTYPES = frozenset({torch.float16, torch.bfloat16})
TRITON_COLUMNS = 16  # of a scale: a multiple of it, or all
SCALED_MULTIPLE = 16  # of inputs and of outputs: what torch._scaled_mm takes


class DeviceProduct(Enum):
    """A way to multiply on a device; see the table above."""

    SCALED_ROWS = "scaled_mm, a scale a row"
    SCALED_SUMS = "scaled_mm, scales on the sums"
    TRITON = "triton"
    STRIPS = "strips"


class StoredForm(Enum):
    """What kernels tell apart. Each row of a weight has scales of its own, or shares them in blocks."""

    FLOAT8_ROWS = "e4m3, a float32 scale a row"
    FLOAT8_BLOCKS = "e4m3, scales in blocks"
    FLOAT4 = "e2m1, scales in blocks of 16 or 32"
    INTEGERS = "integers, scales in groups"
    OTHER = "anything else, such as integers with a group for each input"


@dataclass(frozen=True)
class ProductShape:
    """x [tokens, inputs] of a dtype times a weight [outputs, inputs]; columns_per_scale 0: one for the row."""

    tokens: int
    outputs: int
    inputs: int
    dtype: torch.dtype
    columns_per_scale: int = 0


def choose_product(
    form: StoredForm, shape: ProductShape, *, features: DeviceFeatures, round_activations: bool
) -> DeviceProduct:
    """The product for it. `round_activations`: they may be rounded to 8 bits."""
    if round_activations and form is StoredForm.FLOAT8_ROWS and scaled_mm_takes(shape, features):
        by_rows = scaled_rows_takes(shape, features)
        return DeviceProduct.SCALED_ROWS if by_rows else DeviceProduct.SCALED_SUMS
    if form is not StoredForm.OTHER and triton_takes(shape, features):
        return DeviceProduct.TRITON
    return DeviceProduct.STRIPS


def triton_takes(shape: ProductShape, features: DeviceFeatures) -> bool:
    """float16 and bfloat16 on NVIDIA's tensor cores from 8.0 on, for few tokens, with scales that tiles can follow."""
    follows = shape.columns_per_scale % TRITON_COLUMNS == 0 or shape.columns_per_scale >= shape.inputs
    fits = shape.dtype in TRITON_DTYPES and 0 < shape.tokens <= TRITON_TOKENS and shape.inputs > 0
    return features.triton and features.at_least(8, 0) and follows and fits


def scaled_mm_takes(shape: ProductShape, features: DeviceFeatures) -> bool:
    """Float8 products: from 8.9 on and on devices of e4m3fnuz; the weight's sizes multiples of 16, any wide result."""
    whole = shape.inputs % SCALED_MULTIPLE == 0 and shape.outputs % SCALED_MULTIPLE == 0
    has_them = features.fnuz or features.at_least(8, 9)
    return has_them and whole and shape.tokens > 0 and shape.inputs > 0 and shape.outputs > 0


def scaled_rows_takes(shape: ProductShape, features: DeviceFeatures) -> bool:
    """With a scale a row and a token: bfloat16 results on 8.9, 9.0 and 10.x.

    On 12.x the library refuses it (pytorch issue 192707); results in float16 depend on which library is behind it.
    """
    known = features.capability in ((8, 9), (9, 0)) or (features.at_least(10, 0) and not features.at_least(11, 0))
    return known and shape.dtype == torch.bfloat16

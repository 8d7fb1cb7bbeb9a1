"""What is done to a weight's stored tensors on its device once a layer is there: steps, and what each makes of them.

The order is that of the steps below. What a device needs is decided from its features and from the scheme alone.

| need | here |
| --- | --- |
| one scale for a fused weight | no product takes one (quant.device_choice): part scales stay, nothing is touched |
| column-major weights for scaled matmul | the transpose of what is stored: a view, made with each product |
| 4-bit tiles | copies of `--kernels fast` (quant.packed), made behind the first token |
| e4m3fnuz | Step.FNUZ: in place, so that no second copy of a weight is held |

e4m3 beside e8m0 scales stays e4m3fn: no product of such a device reads it, and the largest e8m0 scale has no double.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING

from quant.device_features import DeviceFeatures
from quant.float8 import FLOAT8_SCHEMES
from quant.scheme import Scheme

if TYPE_CHECKING:
    import torch


class Step(Enum):
    """One change of a weight's stored tensors."""

    FNUZ = "e4m3fnuz"


def what_to_process(scheme: Scheme, features: DeviceFeatures) -> tuple[Step, ...]:
    """The steps for a weight of this scheme on such a device, in their order; none on a CPU."""
    return (Step.FNUZ,) if features.fnuz and isinstance(scheme, FLOAT8_SCHEMES) else ()


def process(stored: Mapping[str, torch.Tensor], steps: tuple[Step, ...]) -> dict[str, torch.Tensor]:
    """A weight's stored tensors after all steps. They lie where they lay, so views of them (of a section, of an expert)
    hold the new numbers too. Raises QuantError for what has been processed already."""
    from quant.fnuz import stored_to_fnuz

    found = dict(stored)
    for step in steps:
        assert step is Step.FNUZ
        found = stored_to_fnuz(found, scales=("weight_scale",))
    return found


def seen_processed(stored: Mapping[str, torch.Tensor], steps: tuple[Step, ...]) -> dict[str, torch.Tensor]:
    """The same memory in the dtypes that it will have behind `process`, whatever it holds now."""
    import torch

    found = dict(stored)
    if Step.FNUZ in steps:
        found["weight"] = found["weight"].view(torch.float8_e4m3fnuz)
    return found

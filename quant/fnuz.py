"""Stored float8 numbers in e4m3fnuz, for devices that multiply only these. In place: no second copy of a weight.

The same byte is half the number there (the exponent's bias is 8, not 7), so scales double. Two kinds of byte mean
something else: 0x80 is the NaN of e4m3fnuz, which has no negative zero, and 0x7F and 0xFF, the NaNs of e4m3fn, are
numbers. Format: OCP 8-bit floating point 1.0 for e4m3fn; "8-bit Numerical Formats for Deep Neural Networks" (Noune et
al., 2022) for e4m3fnuz.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quant.errors import QuantError

NAN = 0x80
_RUN = 1 << 22  # bytes whose masks are held at a time
_E8M0_NAN = 0xFF


def weight_to_fnuz(weight: torch.Tensor) -> torch.Tensor:
    """The contiguous e4m3fn tensor's own memory, rewritten and seen as e4m3fnuz: half of each number; NaN stays NaN.

    Raises QuantError for other dtypes, so that nothing is converted twice.
    """
    if weight.dtype != torch.float8_e4m3fn:
        raise QuantError(f"e4m3fnuz is made of float8_e4m3fn, not of {str(weight.dtype).removeprefix('torch.')}")
    codes = weight.view(torch.uint8).view(-1)
    for start in range(0, codes.numel(), _RUN):
        run = codes[start : start + _RUN]
        negative_zero, nan = run == NAN, (run & 0x7F) == 0x7F
        run.masked_fill_(negative_zero, 0).masked_fill_(nan, NAN)
    return weight.view(torch.float8_e4m3fnuz)


def double_scale(scale: torch.Tensor) -> torch.Tensor:
    """A scale, doubled in place: of a float dtype, or e8m0 (whose largest number, 2^127, becomes NaN)."""
    if scale.dtype != torch.float8_e8m0fnu:
        return scale.mul_(2)
    codes = scale.view(torch.uint8)
    codes.add_((codes != _E8M0_NAN).to(torch.uint8))
    return scale


def stored_to_fnuz(stored: Mapping[str, torch.Tensor], *, scales: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """A parameter's tensors as such a device takes them: every e4m3fn "weight" becomes e4m3fnuz, and what is named in
    `scales` (of the weight, of its inputs, of keys and values) doubles; both in place. Others are handed on.

    Raises QuantError where the weight is no e4m3fn, or a scale that is named is missing.
    """
    missing = [name for name in scales if name not in stored]
    if missing:
        raise QuantError(f"no scale {', '.join(missing)} to double for e4m3fnuz: there is {', '.join(stored)}")
    found = dict(stored)
    found["weight"] = weight_to_fnuz(stored["weight"])
    for name in scales:
        double_scale(stored[name])
    return found

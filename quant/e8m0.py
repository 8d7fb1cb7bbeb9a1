"""E8M0 scales: a byte that stands for 2^(byte - 127), and 0xFF for NaN. It has neither sign nor zero.

Format: OCP Microscaling Formats (MX) 1.0, section 5.4.1 (the type) and 6.3 (a block's shared scale).
"""

from __future__ import annotations

import torch

NAN = 0xFF
_MANTISSA_BITS = 23  # of a float32
_HALF_OR_QUIET = 1 << 22  # the mantissa of 2^-127, which is subnormal in float32, and of the NaN that operators make


def codes_of(amax_bits: torch.Tensor, *, largest_exponent: int) -> torch.Tensor:
    """int32 codes of 2^(floor(log2 amax) - largest_exponent), of float32 magnitudes given by their bits as int32.

    At least 0, which is also what a block of zeros gets; NaN where amax is NaN or infinite.
    """
    codes = (amax_bits >> _MANTISSA_BITS).sub_(largest_exponent).clamp_min_(0)
    # One more in the exponent turns NaN's and infinity's bits, and no others, negative: they get back what was taken.
    faults = (amax_bits + (1 << _MANTISSA_BITS)).bitwise_right_shift_(31)
    return codes.add_(faults.bitwise_and_(largest_exponent))


def reciprocal(codes: torch.Tensor) -> torch.Tensor:
    """float32 2^(127 - code) of int32 codes up to 253, exactly; 0 for NaN, so that what is beside a NaN becomes 0."""
    return (254 - codes).clamp_min_(0).mul_(1 << _MANTISSA_BITS).view(torch.float32)


def numbers(codes: torch.Tensor) -> torch.Tensor:
    """float32 numbers of codes (torch.float8_e8m0fnu or uint8), exactly, by integer operations; any shape or device."""
    if codes.dtype != torch.uint8:
        codes = codes.view(torch.uint8)
    codes = codes.int()
    special = ((codes == 0) | (codes == NAN)).int().mul_(_HALF_OR_QUIET)
    return codes.mul_(1 << _MANTISSA_BITS).bitwise_or_(special).view(torch.float32)

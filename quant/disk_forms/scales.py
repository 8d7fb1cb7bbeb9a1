"""Scales as methods store them, whatever they call them: dtypes, and why some are not used. Imports no torch."""

from __future__ import annotations

from quant.disk_forms.form import FoundTensor
from quant.dtypes import DType

FLOATS = (DType.F32, DType.BF16, DType.F16)
E8M0 = (DType.U8, DType.F8_E8M0)  # a byte each, which some writers call U8: its exponent
OF_ACTIVATIONS = "scale of quantized activations, which are computed wide here"
"""Why a scale of inputs or outputs is not used."""


def float_dtype(scale: FoundTensor | None) -> DType:
    """The dtype in which scales are kept: that on disk. Scales that are not there, or of another kind, are told of when
    the tensors are matched; until then they are taken for float16."""
    return scale.dtype if scale is not None and scale.dtype in FLOATS else DType.F16

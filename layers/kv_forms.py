"""What a KV cache keeps of its keys and values, as data: which tensors, of which shapes. Imports no torch.

| --kv-cache-dtype | a number x of a head and token is kept as | bits a number (head_dim 128, bfloat16) |
| --- | --- | --- |
| auto | itself, in the model's dtype | 16 |
| fp8, fp8_e4m3 | e4m3 of x / scale; a scale for a layer's keys, one for its values: 1, or the checkpoint's | 8 |
| int8 | round(x / scale), -127 to 127; one float32 scale a head and token, largest magnitude / 127 | 8.25 |
| int4 | round((x - minimum) / scale), 0 to 15; scale and minimum for each group of 32 numbers of a head and token | 5 |

int4 is asymmetric since keys are seldom centred (Liu et al. 2024, arXiv:2402.02750), and its groups lie within one
token, so that no token waits for another. Their minimum is kept in the model's dtype, in which it is one of the numbers
and so exact. A head_dim that is no multiple of 32 ends in a shorter group.
"""

from __future__ import annotations

from quant.dtypes import DType
from quant.scheme import StoredSpec

CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "int8", "int4")
GROUP = 32  # numbers along head_dim that share a scale and a minimum in int4


def cache_form(name: str) -> str:
    """The one name of a form that has several: "fp8" for "fp8_e4m3". Raises ValueError for an unknown one."""
    if name not in CACHE_DTYPES:
        raise ValueError(f"KV cache dtype {name!r} is not known: choose one of {', '.join(CACHE_DTYPES)}")
    return name.removesuffix("_e4m3")


def kept_tensors(name: str, shape: tuple[int, ...], *, wide: DType, fnuz: bool = False) -> dict[str, StoredSpec]:
    """What is kept of numbers [..., head_dim], which are `wide` before; fp8 as e4m3fnuz where it is `fnuz`.

    "codes", and beside them the "scale" [...] of int8, the "scale" and "minimum" [..., ceil(head_dim / 32)] of int4.
    """
    *lead, width = shape
    groups = (*lead, -(-width // GROUP))
    forms = {
        "auto": {"codes": StoredSpec(shape, wide)},
        "fp8": {"codes": StoredSpec(shape, DType.F8_E4M3FNUZ if fnuz else DType.F8_E4M3)},
        "int8": {"codes": StoredSpec(shape, DType.I8), "scale": StoredSpec(tuple(lead), DType.F32)},
        "int4": {
            "codes": StoredSpec((*lead, -(-width // 2)), DType.U8),
            "scale": StoredSpec(groups, wide),
            "minimum": StoredSpec(groups, wide),
        },
    }
    return forms[cache_form(name)]

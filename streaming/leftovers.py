"""Tensors that writers leave in checkpoints and that no parameter needs: which may be dropped, and why. [no-torch]

Only what provably changes nothing is let go: a bias of zeros, the order of groups where it is the usual one, scales of
a cache that is not quantized. Whatever may be a weight stays a problem.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Literal

from layers.weights import ParamSpec
from quant.dtypes import DType
from streaming.checkpoint.tensors import TensorInfo

ReadTensor = Callable[[TensorInfo], bytes]
"""All bytes of one small tensor."""

CACHE_SCALE = "KV-cache scale: the cache is not quantized"
QUERY_SCALE = "scale of a quantized attention, which is computed wide here"
_CACHE = re.compile(r"\.(kv_scale|[kv]_scale|[kv]_zero_point)$|\.[kv]_proj\.output_(scale|zero_point)$")
_QUERY = re.compile(r"\.(q_scale|q_zero_point|prob_scale|prob_output_scale)$|\.q_proj\.output_(scale|zero_point)$")
_SMALL_NBYTES = 1 << 20  # a group index has one number for each input; nothing larger is read to be looked at


def leftover_reason(
    info: TensorInfo,
    param: str,
    params: Mapping[str, ParamSpec],
    *,
    read: ReadTensor,
    group_size: int | None,
) -> str | None:
    """Why a tensor that would be `param`, which the model does not have, may be dropped; None where it may not.

    `group_size`: that of the checkpoint's quantization, -1 for one group, None where it names none.
    """
    if _CACHE.search(info.name):
        return CACHE_SCALE
    if _QUERY.search(info.name):
        return QUERY_SCALE
    module, _, leaf = param.rpartition(".")
    if f"{module}.weight" not in params or len(info.shape) != 1 or _largest(info) > _SMALL_NBYTES:
        return None
    if leaf == "bias" and info.encoding is None and holds_only_zeros(info, _own_bytes(info, read)):
        return "a bias of zeros for a layer without one"
    if leaf == "g_idx" and info.dtype in (DType.I32, DType.I64) and info.encoding is None:
        usual = _is_usual(_own_bytes(info, read), info, group_size)
        return "the order of groups, which is the usual one (i // group_size)" if usual else None
    return None


def _largest(info: TensorInfo) -> int:
    """Bytes of its span in the file, or of its numbers where they are more (a few that are repeated)."""
    return max(info.nbytes, info.numel * info.dtype.itemsize)


def holds_only_zeros(info: TensorInfo, data: bytes) -> bool:
    """Whether the numbers are all zero, negative zeros among them."""
    size = info.dtype.itemsize
    last = 0 if info.big_endian else size - 1  # the byte of a float in which its sign stands
    signs = data[last::size]
    others = (data[byte::size] for byte in range(size) if byte != last)
    return not any(map(any, others)) and not signs.strip(b"\x00\x80" if info.dtype.is_float else b"\x00")


def _own_bytes(info: TensorInfo, read: ReadTensor) -> bytes:
    """The bytes of a vector's numbers one behind the other, without what lies between them where it is a view."""
    data, size = read(info), info.dtype.itemsize
    if info.strides is None:
        return data
    steps = (index * info.strides[0] * size for index in range(info.shape[0]))
    return b"".join(data[at : at + size] for at in steps)


def _is_usual(data: bytes, info: TensorInfo, group_size: int | None) -> bool:
    """Whether input i is in group i // group_size; where no size is named, in that of some size."""
    inputs, itemsize = info.shape[0], info.dtype.itemsize
    if group_size is None:
        group_size = next((at // itemsize for at, byte in enumerate(data) if byte), -1)
    return data == _usual_order(inputs, group_size if group_size > 0 else max(1, inputs), itemsize, info.big_endian)


@lru_cache(maxsize=64)  # a model has few sizes, and hundreds of tensors of each
def _usual_order(inputs: int, size: int, itemsize: int, big_endian: bool) -> bytes:
    order: Literal["big", "little"] = "big" if big_endian else "little"
    groups = (group.to_bytes(itemsize, order) * min(size, inputs - group * size) for group in range(-(-inputs // size)))
    return b"".join(groups)

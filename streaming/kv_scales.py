"""The scales that a checkpoint holds for an fp8 KV cache, read before the first forward pass. [no-torch]

The plan drops them as tensors that no parameter needs; what becomes of them depends on --kv-cache-dtype.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import cast

from layers.kv_forms import cache_form
from layers.kv_scales import KVPart, kv_scale_name
from layers.model_config import ModelConfig
from quant.dtypes import DType
from streaming.checkpoint.tensors import Checkpoint, TensorInfo
from streaming.errors import CheckpointError
from streaming.leftovers import CACHE_SCALE
from streaming.plan import LoadPlan

KVScales = tuple[tuple[float, float], ...]
"""For each layer the scale of its keys and that of its values."""
ReadTensors = Callable[[Sequence[TensorInfo]], Sequence[bytes]]

LEAST, MOST = 1e-30, 1e30  # far from where float32 ends, scaled by what decoding needs
USED = "KV-cache scale: read by the cache itself"
NEEDLESS = "KV-cache scale: the cache makes its own"


def cache_scales(
    plan: LoadPlan, checkpoint: Checkpoint, *, cache_dtype: str, num_layers: int, read: ReadTensors | None = None
) -> tuple[LoadPlan, KVScales | None]:
    """The plan, with the words for what becomes of KV-cache scales, and the scales for the cache (None: 1 everywhere).

    Raises CheckpointError for one that is no number above 0, and for two that contradict each other.
    """
    form = cache_form(cache_dtype)
    if form == "auto":
        return plan, None
    named = {name for name, reason in plan.dropped.items() if reason == CACHE_SCALE}
    found = [info for info in checkpoint.tensors.values() if info.name in named and kv_scale_name(info.name)]
    if form != "fp8":
        return _reworded(plan, found, NEEDLESS), None
    if checkpoint.saved is not None:
        return plan, _saved_scales(checkpoint, num_layers)
    scales = _by_layer(found, (read or read_tensors)(found), num_layers) if found else None
    return _reworded(plan, found, USED), scales


def scales_on_device(scales: KVScales | None, *, cache_dtype: str, config: ModelConfig, fnuz: bool) -> KVScales | None:
    """The scales of a cache on its device: doubled, those of 1 too, where an fp8 cache holds e4m3fnuz (`fnuz`), whose
    codes stand for half the numbers. What a checkpoint or a folder of shards holds is never doubled."""
    if not fnuz or cache_form(cache_dtype) != "fp8":
        return scales
    return tuple((2 * keys, 2 * values) for keys, values in scales or ((1.0, 1.0),) * config.num_layers)


def scales_to_save(
    plan: LoadPlan, checkpoint: Checkpoint, *, num_layers: int, read: ReadTensors | None = None
) -> KVScales | str | None:
    """The scales that the checkpoint holds, whatever cache this load has; None where it holds none; what is wrong with
    them, which only a load with an fp8 cache is refused for, where they are not usable."""
    reasons = (CACHE_SCALE, USED, NEEDLESS)
    named = {name for name, reason in plan.dropped.items() if reason in reasons and kv_scale_name(name)}
    found = [info for info in checkpoint.tensors.values() if info.name in named]
    try:
        return _by_layer(found, (read or read_tensors)(found), num_layers) if found else None
    except CheckpointError as error:
        return str(error)


def _saved_scales(checkpoint: Checkpoint, num_layers: int) -> KVScales | None:
    """What save-shards has written of them."""
    assert checkpoint.saved is not None
    found = checkpoint.saved["kv_scales"]
    if isinstance(found, str):
        raise CheckpointError(f"{checkpoint.name}: {found}")
    if found is not None and len(found) != num_layers:
        raise CheckpointError(f"{checkpoint.name}: kv_scales are of {len(found)} layers; the model has {num_layers}")
    return None if found is None else tuple((float(keys), float(values)) for keys, values in found)


def is_scale(number: object) -> bool:
    """Whether a cache can be scaled by it."""
    return type(number) in (int, float) and LEAST <= cast(float, number) <= MOST  # NaN is neither


def _reworded(plan: LoadPlan, infos: Sequence[TensorInfo], reason: str) -> LoadPlan:
    if not infos:
        return plan
    nbytes = Counter(plan.unused)
    for info in infos:
        nbytes[plan.dropped[info.name]] -= info.nbytes
        nbytes[reason] += info.nbytes
    dropped = {**plan.dropped, **dict.fromkeys((info.name for info in infos), reason)}
    return replace(plan, dropped=dropped, unused={why: count for why, count in nbytes.items() if count > 0})


def _by_layer(infos: Sequence[TensorInfo], data: Sequence[bytes], num_layers: int) -> KVScales:
    """One for keys and values together holds where there is none for either alone."""
    found: dict[tuple[int, KVPart], tuple[float, str]] = {}
    for info, held in zip(infos, data, strict=True):
        place, scale = kv_scale_name(info.name), _number(info, held)
        assert place is not None
        earlier = found.setdefault((place.layer, place.part), (scale, info.name))
        if earlier[0] != scale:
            raise CheckpointError(
                f"{info.name} is {scale:g} and {earlier[1]} is {earlier[0]:g}: both scale the same part of the KV "
                "cache; --kv-cache-dtype auto, int8 and int4 use neither"
            )
    return tuple((_scale(found, layer, "k"), _scale(found, layer, "v")) for layer in range(num_layers))


def _scale(found: Mapping[tuple[int, KVPart], tuple[float, str]], layer: int, part: KVPart) -> float:
    both = found.get((layer, "kv"), (1.0, ""))
    return found.get((layer, part), both)[0]


def _number(info: TensorInfo, data: bytes) -> float:
    """The one number of a scale. Raises CheckpointError where it is none that a cache can be scaled by."""
    formats = {DType.F64: "d", DType.F32: "f", DType.F16: "e", DType.BF16: "f"}
    if info.numel != 1 or info.dtype not in formats or info.encoding is not None:
        raise CheckpointError(
            f"{info.name}: {list(info.shape)} {info.dtype.value}; a KV-cache scale is one floating-point number for a "
            "layer (--kv-cache-dtype auto, int8 and int4 do without)"
        )
    order, held = (">" if info.big_endian else "<"), bytes(data[: info.dtype.itemsize])
    if info.dtype is DType.BF16:
        held = held + b"\0\0" if info.big_endian else b"\0\0" + held
    (number,) = struct.unpack(order + formats[info.dtype], held)
    if not is_scale(number):
        raise CheckpointError(f"{info.name} is {number:g}: a KV-cache scale is a number from {LEAST:g} to {MOST:g}")
    return float(number)


def read_tensors(infos: Sequence[TensorInfo]) -> list[bytes]:
    """All bytes of a few small tensors; each file is opened once."""
    from streaming.file_ranges import open_ranges

    found: dict[int, bytes] = {}
    for file in {info.file: None for info in infos}:
        here = [index for index, info in enumerate(infos) if info.file == file and _is_small(info)]
        with closing(open_ranges(file)) as ranges:
            read = ranges.read([(infos[index].offset, infos[index].nbytes) for index in here])
        found.update(zip(here, map(bytes, read), strict=True))
    return [found.get(index, b"") for index in range(len(infos))]


def _is_small(info: TensorInfo) -> bool:
    """Whether it can be a single number; what is not is refused without being read."""
    return info.nbytes <= DType.F64.itemsize

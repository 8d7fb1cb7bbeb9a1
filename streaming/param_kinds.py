"""Which parameters are read alike: layers of a model are, so what is found of one is true of the others. [no-torch]"""

from __future__ import annotations

from collections.abc import Hashable

from layers.weights import ParamSpec
from streaming.checkpoint.tensors import TensorInfo
from streaming.plan_items import Filling


def param_traits(param: ParamSpec, filling: Filling) -> Hashable:
    """All that a parameter's items depend on, but for names and places."""
    sources = filling.sources
    parts = sources.parts.get(param.name, {})
    coded = sources.coded.get(param.name, {})
    return (
        (param.shape, param.sections, param.kind, param.dtype, param.scheme),
        (param.forms, param.runs, param.sharding),
        tuple((section, first, _traits_of(info)) for section, (info, first) in parts.items()),
        tuple((run, leaf, _traits_of(info)) for run, found in coded.items() for leaf, info in found.items()),
    )


def _traits_of(info: TensorInfo) -> Hashable:
    plain = info.shape, info.dtype, info.nbytes
    if info.is_plain and not info.generated:
        return plain
    order = info.encoding, info.rope_heads, info.big_endian, info.strides, info.shift
    return (*plain, order, info.generated)

"""Tensors of all experts of a layer as one for each of them: views of the same bytes of the file. [no-torch]"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from layers.fused_experts import expert_name, holds_gate_up, is_fused, is_fused_weight, lie_transposed
from layers.weights import LayerSpec
from streaming.checkpoint.tensors import TensorInfo


def by_expert(
    tensors: Mapping[str, TensorInfo], specs: Sequence[LayerSpec], *, usually_transposed: bool, interleaved: bool
) -> Mapping[str, TensorInfo]:
    """The tensors, each that holds all experts replaced by one per expert; `usually_transposed`: the family's files
    hold an expert as [in, out]. `interleaved`: outputs of an expert's gate and up take turns; loading puts them right.

    Their names are the experts' own; `TensorInfo.name` stays what it is in the file.
    """
    fused = [name for name, info in tensors.items() if is_fused(name, len(info.shape)) and info.is_plain]
    if not fused:
        return tensors
    transposed = _transposed(fused, tensors, specs, usually=usually_transposed)
    found = {name: info for name, info in tensors.items() if name not in set(fused)}
    for name in fused:
        whole = tensors[name]
        for expert in range(whole.shape[0]):
            part = _part(whole, expert, transposed=transposed and is_fused_weight(name))
            if interleaved and holds_gate_up(name):
                part = replace(part, rope_heads=1)
            found[expert_name(name, expert)] = part
    return found


def _transposed(
    fused: Sequence[str], tensors: Mapping[str, TensorInfo], specs: Sequence[LayerSpec], *, usually: bool
) -> bool:
    params = (param for spec in specs for param in spec.params)
    down = next((param for param in params if param.name.endswith(".experts.down_proj.weight")), None)
    if down is None:  # no layer is sparse: they will have no home
        return usually
    shapes = [tensors[name].shape for name in fused if name.endswith(".down_proj")]
    return lie_transposed(shapes, rows=down.section_rows[0], in_features=down.shape[1], usually=usually)


def _part(whole: TensorInfo, expert: int, *, transposed: bool) -> TensorInfo:
    nbytes = prod(whole.shape[1:]) * whole.dtype.itemsize
    part = replace(whole, shape=whole.shape[1:], offset=whole.offset + expert * nbytes, nbytes=nbytes)
    return part.transposed() if transposed else part

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
    fused = {n: info.shape for n, info in tensors.items() if is_fused(n, len(info.shape)) and info.is_plain}
    if not fused:
        return tensors
    transposed = lie_transposed(fused, specs, usually=usually_transposed)
    if transposed is None:  # no layer is sparse: they will have no home
        transposed = usually_transposed
    found = {name: info for name, info in tensors.items() if name not in fused}
    for name in fused:
        whole = tensors[name]
        for expert in range(whole.shape[0]):
            part = _part(whole, expert, transposed=transposed and is_fused_weight(name))
            if interleaved and holds_gate_up(name):
                part = replace(part, rope_heads=1)
            found[expert_name(name, expert)] = part
    return found


def _part(whole: TensorInfo, expert: int, *, transposed: bool) -> TensorInfo:
    nbytes = prod(whole.shape[1:]) * whole.dtype.itemsize
    part = replace(whole, shape=whole.shape[1:], offset=whole.offset + expert * nbytes, nbytes=nbytes)
    return part.transposed() if transposed else part

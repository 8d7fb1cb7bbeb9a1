"""Names under which checkpoints keep the scales of an fp8 KV cache. Imports no torch.

Writers have put them beside the attention (`self_attn.k_scale`, compressed-tensors), inside it
(`self_attn.attn.k_scale`), at the projections (`k_proj.k_scale`, `qkv_proj.k_scale`), as the scale of a projection's
output (`k_proj.output_scale`), and, the oldest, as one for keys and values (`kv_scale`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

KVPart = Literal["k", "v", "kv"]

_PLACE = r"(?:^|\.)(?:layers|h|blocks)\.(?P<layer>[0-9]{1,6})\.(?:[A-Za-z_]+\.)*?"
_LEAF = (
    r"(?:(?P<part>kv|k|v)_scale"  # beside the attention or inside it
    r"|(?P<own>[kv])_proj\.(?:(?P=own)_scale|output_scale)"
    r"|qkv_proj\.(?P<fused>[kv])_scale)"
)
_SCALE = re.compile(_PLACE + r"(?:self_attn|attn|attention|self_attention)\.(?:attn\.)?" + _LEAF + r"\Z")


@dataclass(frozen=True)
class KVScaleName:
    """Whose scale a tensor is: of a layer's keys, its values, or both."""

    layer: int
    part: KVPart


def kv_scale_name(name: str) -> KVScaleName | None:
    """What a checkpoint's tensor scales in the KV cache; None for any other tensor."""
    found = _SCALE.search(name)
    if found is None:
        return None
    parts: dict[str, KVPart] = {"k": "k", "v": "v", "kv": "kv"}
    return KVScaleName(int(found["layer"]), parts[found["part"] or found["own"] or found["fused"]])

"""GGUF's tensor names in Hugging Face's spelling: `blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`.

Source of the names: llama.cpp, gguf-py/gguf/tensor_mapping.py. [no-torch]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

ROPE_FREQS = "rope_freqs.weight"
ROPE_LONG, ROPE_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
# numbers that the configuration takes over; no parameter is loaded from them
CONFIG_TENSORS = frozenset({ROPE_FREQS, ROPE_LONG, ROPE_SHORT})

_TOP: Mapping[str, str] = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
_IN_LAYER: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_rot_embd": "self_attn.rotary_emb.inv_freq",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<module>\w+)\.(?P<leaf>weight|bias)")
_OUTSIDE = re.compile(r"(?P<module>\w+)\.(?P<leaf>weight|bias)")


def hub_name(name: str, architecture: str) -> str:
    """The Hugging Face name; a name that is not known stays as it is, so that whoever misses it can name it."""
    if (inside := _LAYER.fullmatch(name)) and (module := _module(inside["module"], architecture)):
        full = f"model.layers.{int(inside['layer'])}.{module}"
        return full if module.endswith("inv_freq") else f"{full}.{inside['leaf']}"
    if (outside := _OUTSIDE.fullmatch(name)) and outside["module"] in _TOP:
        return f"{_TOP[outside['module']]}.{outside['leaf']}"
    return name


def _module(name: str, architecture: str) -> str | None:
    if architecture == "phi3" and name == "ffn_up":  # gate and up in one matrix, gate first
        return "mlp.gate_up_proj"
    return _IN_LAYER.get(name)

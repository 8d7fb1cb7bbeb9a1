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
_SANDWICH: Mapping[str, str] = MappingProxyType(
    {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
# where an architecture's modules differ from the others'
_OWN: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "phi3": {"ffn_up": "mlp.gate_up_proj"},  # gate and up in one matrix, gate first
        "gemma2": _SANDWICH,
        "gemma3": _SANDWICH,
        "olmo2": _SANDWICH,
        "gpt2": {"ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        "phi2": {"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    }
)
_OWN_TOP: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gpt2": {"position_embd": "model.layers.0.embed_positions"},
        "phi2": {"output_norm": "model.final_layernorm"},
    }
)
_LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<module>\w+)\.(?P<leaf>weight|bias)")
_OUTSIDE = re.compile(r"(?P<module>\w+)\.(?P<leaf>weight|bias)")


def hub_name(name: str, architecture: str) -> str:
    """The Hugging Face name; a name that is not known stays as it is, so that whoever misses it can name it."""
    if (inside := _LAYER.fullmatch(name)) and (module := _module(inside["module"], architecture)):
        full = f"model.layers.{int(inside['layer'])}.{module}"
        return full if module.endswith("inv_freq") else f"{full}.{inside['leaf']}"
    top = {**_TOP, **_OWN_TOP.get(architecture, {})}
    if (outside := _OUTSIDE.fullmatch(name)) and outside["module"] in top:
        return f"{top[outside['module']]}.{outside['leaf']}"
    return name


def _module(name: str, architecture: str) -> str | None:
    return _OWN.get(architecture, {}).get(name) or _IN_LAYER.get(name)

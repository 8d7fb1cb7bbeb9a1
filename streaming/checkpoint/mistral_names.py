"""Meta's and Mistral's own tensor names in Hugging Face's spelling. [no-torch]

`layers.0.attention.wq.weight` -> `model.layers.0.self_attn.q_proj.weight`. Sources: meta-llama/llama `model.py`,
mistralai/mistral-inference `transformer_layers.py`, and the conversion scripts for both models in transformers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

_TOP: Mapping[str, str] = MappingProxyType(
    {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
)
_IN_LAYER: Mapping[str, str] = MappingProxyType(
    {
        "attention_norm": "input_layernorm",
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj",
    }
)
_LAYER = re.compile(r"layers\.(?P<layer>\d{1,6})\.(?P<module>[\w.]+)\.(?P<leaf>weight|bias)", re.ASCII)
_OUTSIDE = re.compile(r"(?P<module>\w+)\.(?P<leaf>weight|bias)")
_ROTARY_TABLE = "rope.freqs"  # Meta's first files hold it; the configuration determines it


def hub_name(name: str) -> str:
    """The Hugging Face name; a name that is not known stays as it is, so that whoever misses it can name it."""
    if name == _ROTARY_TABLE:
        return "model.rotary_emb.inv_freq"
    if (inside := _LAYER.fullmatch(name)) and inside["module"] in _IN_LAYER:
        return f"model.layers.{int(inside['layer'])}.{_IN_LAYER[inside['module']]}.{inside['leaf']}"
    if (outside := _OUTSIDE.fullmatch(name)) and outside["module"] in _TOP:
        return f"{_TOP[outside['module']]}.{outside['leaf']}"
    return name

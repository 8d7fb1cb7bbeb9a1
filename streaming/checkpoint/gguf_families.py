"""GGUF's architectures whose family is known: how they differ from llama's keys, names and numbers. [no-torch]

Sources: llama.cpp's convert_hf_to_gguf.py (what was done to each family's config.json and tensors), and where a number
is not kept as metadata, `llama_model::load_hparams`, which has it as a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from streaming.checkpoint.gguf_keys import GgufSource

Sizes = Mapping[str, Any]  # config.json's sizes, as far as they are known
Extras = Callable[[GgufSource, Sizes], dict[str, Any]]

_GEMMA_2_27B, _GEMMA_3_27B = 46, 62  # layers of the two models whose scores are scaled by hidden size / heads
_GEMMA_ACTIVATION: Mapping[str, Any] = MappingProxyType({"hidden_activation": "gelu_pytorch_tanh"})


def _nothing(source: GgufSource, sizes: Sizes) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class GgufFamily:
    """One architecture. `norm_shift`: what the converter's norm weights need added to be the model's own."""

    model_type: str
    model_class: str  # the one name in `architectures`
    extras: Extras = _nothing  # keys of config.json beside those that all have
    interleaved: bool = False  # the converter makes neighbours of the rows of q and k that are rotated together
    layer_norms: bool = False
    norm_shift: float = 0.0


def _window(source: GgufSource) -> int | None:
    """0 stands for none."""
    return source.size("attention.sliding_window") if source.find("attention.sliding_window") else None


def _llama(source: GgufSource, sizes: Sizes) -> dict[str, Any]:
    """Mistral's models are written as llama; those without a window are the same in both families."""
    window = _window(source)
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]} if window else {}
    return {**mistral, "sliding_window": window}


def _phi3(source: GgufSource, sizes: Sizes) -> dict[str, Any]:
    return {"sliding_window": _window(source)}


def _gemma(source: GgufSource, sizes: Sizes) -> dict[str, Any]:
    return dict(_GEMMA_ACTIVATION)


def _gemma2(source: GgufSource, sizes: Sizes) -> dict[str, Any]:
    return {
        **_GEMMA_ACTIVATION,
        "sliding_window": _window(source),
        "attn_logit_softcapping": source.real("attn_logit_softcapping", default=50.0),
        "final_logit_softcapping": source.real("final_logit_softcapping", default=30.0),
        "query_pre_attn_scalar": _query_scalar(sizes, _GEMMA_2_27B),
    }


def _gemma3(source: GgufSource, sizes: Sizes) -> dict[str, Any]:
    config = {
        **_GEMMA_ACTIVATION,
        "sliding_window": _window(source),
        "query_pre_attn_scalar": _query_scalar(sizes, _GEMMA_3_27B),
        "rope_theta": source.real("rope.freq_base", default=1e6),
        "rope_local_base_freq": source.real("rope.freq_base_swa", default=1e4),
        "sliding_window_pattern": 6,
    }
    if source.find("final_logit_softcapping"):
        config["final_logit_softcapping"] = source.real("final_logit_softcapping")
    return config


def _query_scalar(sizes: Sizes, large: int) -> float:
    """What scores are divided by the root of: the width of a head, but in each version's largest model."""
    if sizes["num_hidden_layers"] == large:
        return float(sizes["hidden_size"] / sizes["num_attention_heads"])
    return float(sizes["head_dim"])


def _olmo2(source: GgufSource, sizes: Sizes) -> dict[str, Any]:
    if _window(source):
        raise source.fault("attention.sliding_window", "is given: OLMo 3 is not supported as GGUF yet")
    return {}


def _granite(source: GgufSource, sizes: Sizes) -> dict[str, Any]:
    scales = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    usual = {"attention_multiplier": sizes["head_dim"] ** -0.5}  # where it is absent or 0
    return {
        ours: source.real(theirs) if source.find(theirs) else usual.get(ours, 1.0) for ours, theirs in scales.items()
    }


def _stablelm(source: GgufSource, sizes: Sizes) -> dict[str, Any]:
    if "blk.0.attn_q_norm.weight" in source.tensors:
        raise source.fault("attention.head_count", "heads have norms of their own: not supported as GGUF yet")
    return {
        "use_parallel_residual": source.flag("use_parallel_residual", default=False),
        "use_qkv_bias": "blk.0.attn_q.bias" in source.tensors,
    }


def _phi2(source: GgufSource, sizes: Sizes) -> dict[str, Any]:
    return {"hidden_act": "gelu_new"}


def _gpt2(source: GgufSource, sizes: Sizes) -> dict[str, Any]:
    """GPT-2's own names of the keys. Its matrices were turned when they were converted: [out, in] as all others."""
    return {
        "n_embd": sizes["hidden_size"],
        "n_layer": sizes["num_hidden_layers"],
        "n_head": sizes["num_attention_heads"],
        "n_inner": sizes["intermediate_size"],
        "n_positions": sizes["max_position_embeddings"],
        "layer_norm_epsilon": source.real("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _command_r(source: GgufSource, sizes: Sizes) -> dict[str, Any]:
    return {
        "logit_scale": source.real("logit_scale", default=0.0625),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in source.tensors,
    }


GGUF_FAMILIES: Mapping[str, GgufFamily] = MappingProxyType(
    {
        "llama": GgufFamily("llama", "LlamaForCausalLM", _llama, interleaved=True),
        "qwen2": GgufFamily("qwen2", "Qwen2ForCausalLM"),
        "qwen3": GgufFamily("qwen3", "Qwen3ForCausalLM"),
        "phi3": GgufFamily("phi3", "Phi3ForCausalLM", _phi3),
        "gemma": GgufFamily("gemma", "GemmaForCausalLM", _gemma, norm_shift=-1.0),
        "gemma2": GgufFamily("gemma2", "Gemma2ForCausalLM", _gemma2, norm_shift=-1.0),
        "gemma3": GgufFamily("gemma3_text", "Gemma3ForCausalLM", _gemma3, norm_shift=-1.0),
        "olmo2": GgufFamily("olmo2", "Olmo2ForCausalLM", _olmo2),
        "granite": GgufFamily("granite", "GraniteForCausalLM", _granite, interleaved=True),
        "stablelm": GgufFamily("stablelm", "StableLmForCausalLM", _stablelm, layer_norms=True),
        "phi2": GgufFamily("phi", "PhiForCausalLM", _phi2, layer_norms=True),
        "gpt2": GgufFamily("gpt2", "GPT2LMHeadModel", _gpt2, layer_norms=True),
        "command-r": GgufFamily("cohere", "CohereForCausalLM", _command_r, layer_norms=True),
    }
)

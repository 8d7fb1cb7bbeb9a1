"""The twin of config.json from params.json, in Hugging Face's keys: Mistral's form of it, and Meta's for Llama.

Which of them: Mistral's gives the width of the MLP (`hidden_dim`), Meta's the rule that it follows from
(`multiple_of`). Sources: mistralai/mistral-inference `args.py`, meta-llama/llama-models `args.py` and `model.py`, and
the conversion scripts for both in transformers. [no-torch]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from layers.config_fields import Fields
from layers.errors import ModelConfigError

_DEFAULT_THETA = 10_000.0
_MISTRAL_CONTEXT = 128_000  # tokens, where the file does not say
_LLAMA_CONTEXT, _LLAMA_3_CONTEXT, _LLAMA_31_CONTEXT = 4096, 8192, 131_072
_LLAMA_3_VOCAB = 128_256
_LLAMA_3_TOKENS: Mapping[str, Any] = MappingProxyType(
    {"bos_token_id": 128_000, "eos_token_id": [128_001, 128_008, 128_009]}
)
_FIRST_TOKENS: Mapping[str, Any] = MappingProxyType({"bos_token_id": 1, "eos_token_id": 2})  # of all Mistral models too
_SCALED_ROPE_WIDTH = 4096  # the smallest Llama 3.1; what is narrower is of 3.2, and stretched by 32 instead of 8

_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "moe": "a mixture of experts",
        "quantization": "a quantized model",
        "vision_encoder": "a model with a vision encoder",
        "multimodal": "a model with encoders",
        "llama_4_scaling": "attention scaled by position (llama_4_scaling)",
        "q_lora_rank": "multi-head latent attention",
        "kv_lora_rank": "multi-head latent attention",
        "use_biases": "a model with biases",
        "qk_norm": "a model with q and k norms",
    }
)
_READ = frozenset(
    {
        "dim", "n_layers", "head_dim", "hidden_dim", "n_heads", "n_kv_heads", "norm_eps", "vocab_size", "rope_theta",
        "sliding_window", "max_seq_len", "max_position_embeddings", "tied_embeddings", "yarn", "activation", "causal",
        "ffn_dim_multiplier", "multiple_of", "use_scaled_rope", "rope_scaling_factor",
    }
)  # fmt: skip
# of the program that runs the model, and not of the model
_LEFT_OUT = frozenset({"max_batch_size", "model_type", "model_parallel_size", "transformer", "lora"})


def mistral_config(params: Fields, *, vocab_rows: int | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """config.json's twin, and notes for the user. `vocab_rows`: rows of the embedding, where it is there.

    Raises ModelConfigError for keys that are missing or hold what cannot be, and for models that cannot be read so.
    """
    _refuse(params)
    heads = params.positive_int("n_heads")
    width = params.positive_int("dim")
    config: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": params.positive_int("n_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": params.positive_int("n_kv_heads", default=heads),
        "head_dim": params.positive_int("head_dim", default=width // heads or None),
        "rms_norm_eps": params.number("norm_eps"),
        "vocab_size": _vocab_size(params, vocab_rows),
        "rope_theta": params.number("rope_theta", default=_DEFAULT_THETA),
        "hidden_act": params.text("activation", default="silu"),
        "tie_word_embeddings": params.flag("tied_embeddings", default=False),
        "attention_bias": False,
        "mlp_bias": False,
    }
    own = _of_mistral(params) if params.has("hidden_dim") else _of_meta(params, config)
    return {**config, **own}, tuple(_notes(params, own))


def _refuse(params: Fields) -> None:
    for key, words in _REFUSED.items():
        if params.raw.get(key):
            raise ModelConfigError(
                f"{params.where}: {key}: {words} is not supported in Mistral's own layout; "
                "use the model's Hugging Face layout"
            )
    if isinstance(params.raw.get("sliding_window"), list):
        raise ModelConfigError(f"{params.where}: sliding_window is a list: a window per layer is not supported")
    if not params.flag("causal", default=True):
        raise ModelConfigError(f"{params.where}: causal is false: the model is no generating one")


def _vocab_size(params: Fields, rows: int | None) -> int:
    """Meta's first files say -1: as many as the tokenizer has, and so has the embedding."""
    if params.raw.get("vocab_size") == -1 and rows:
        return rows
    return params.positive_int("vocab_size", default=rows)


def _of_mistral(params: Fields) -> dict[str, Any]:
    scaling = _yarn(params)
    stretched = int(scaling["factor"] * scaling["original_max_position_embeddings"]) if scaling else None
    return {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "intermediate_size": params.positive_int("hidden_dim"),
        "sliding_window": params.optional_int("sliding_window"),
        "max_position_embeddings": _context(params, stretched or _MISTRAL_CONTEXT),
        "rope_scaling": scaling,
        **_FIRST_TOKENS,
    }


def _yarn(params: Fields) -> dict[str, Any] | None:
    """`alpha` and `beta` are YaRN's slow and fast bounds; without `apply_scale` attention stays as it is."""
    if not (raw := params.section("yarn")):
        return None
    yarn = Fields(raw, where=f"{params.where}: yarn")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": yarn.number("factor"),
        "original_max_position_embeddings": yarn.positive_int("original_max_position_embeddings"),
        "beta_fast": yarn.number("beta", default=32.0),
        "beta_slow": yarn.number("alpha", default=1.0),
    }
    return scaling if yarn.flag("apply_scale", default=True) else {**scaling, "attention_factor": 1.0}


def _context(params: Fields, default: int) -> int:
    """Tokens that the model was made for."""
    return params.positive_int("max_position_embeddings", default=params.positive_int("max_seq_len", default=default))


def _of_meta(params: Fields, config: Mapping[str, Any]) -> dict[str, Any]:
    is_third = config["vocab_size"] >= _LLAMA_3_VOCAB
    stretched = params.flag("use_scaled_rope", default=False)
    context = _LLAMA_31_CONTEXT if stretched else _LLAMA_3_CONTEXT if is_third else _LLAMA_CONTEXT
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "intermediate_size": _mlp_width(params),
        "max_position_embeddings": _context(params, context),
        "rope_scaling": _scaled_rope(params) if stretched else None,
        **(_LLAMA_3_TOKENS if is_third else _FIRST_TOKENS),
    }


def _mlp_width(params: Fields) -> int:
    """Two thirds of four times the width, times a factor, rounded up to a multiple (`FeedForward` in model.py)."""
    if not params.has("multiple_of"):
        raise ModelConfigError(f"{params.where}: has neither hidden_dim nor multiple_of; the MLP's width is not known")
    width, unit = int(8 * params.positive_int("dim") / 3), params.positive_int("multiple_of")
    if params.has("ffn_dim_multiplier") and (times := params.optional_number("ffn_dim_multiplier")):
        width = int(times * width)
    return -(-width // unit) * unit


def _scaled_rope(params: Fields) -> dict[str, Any]:
    """Llama 3.1's stretched frequencies (`apply_scaling` in model.py, whose numbers are constants there)."""
    usual = 8.0 if params.positive_int("dim") >= _SCALED_ROPE_WIDTH else 32.0
    return {
        "rope_type": "llama3",
        "factor": params.number("rope_scaling_factor", default=usual),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _notes(params: Fields, own: Mapping[str, Any]) -> Iterator[str]:
    if own["model_type"] == "llama" and own["rope_scaling"] and not params.has("rope_scaling_factor"):
        factor = own["rope_scaling"]["factor"]
        yield f"{params.where}: use_scaled_rope gives no factor; {factor:g} is taken (8 for Llama 3.1, 32 for 3.2)"
    unknown = sorted(key for key in params.raw if key not in _READ | _LEFT_OUT | _REFUSED.keys())
    if unknown:
        yield f"{params.where}: keys that are not known have no effect: {', '.join(unknown[:10])}"

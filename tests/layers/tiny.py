"""Tiny models for tests: a small configuration of a family, random weights, and the model filled from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from layers.architecture import layer_specs
from layers.batch import make_batch
from layers.config import parse_config, weight_map
from layers.context import StepContext
from layers.decoder import DecoderModel, build_shell
from layers.eager import fill_shell
from layers.kv_cache import KVCache
from layers.model_config import ModelConfig, RopeConfig
from layers.weights import LayerSpec
from quant.dtypes import DType
from quant.kernels import Kernels
from quant.scheme import Scheme
from quant.wide import Wide

BASE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
ARCHITECTURES = {
    "cohere": "CohereForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "stablelm": "StableLmForCausalLM",
}


@dataclass(frozen=True)
class OneScheme:
    """A policy that keeps every linear weight in one scheme, and everything else wide."""

    scheme: Scheme
    head: bool = False

    def scheme_for(self, kind: str, name: str) -> Scheme:
        quantized = kind == "linear" or (name == "lm_head.weight" and self.head)
        return self.scheme if quantized else Wide()


ALL_WIDE = OneScheme(Wide())


def raw_config(model_type: str = "llama", **changes: Any) -> dict[str, Any]:
    """A config.json of the family, with changes."""
    return {"model_type": model_type, "architectures": [ARCHITECTURES[model_type]], **BASE, **changes}


def config_of(model_type: str = "llama", **changes: Any) -> ModelConfig:
    return parse_config(raw_config(model_type, **changes))


def rope_of(config: ModelConfig) -> RopeConfig:
    """The rotary settings of a configuration that has some."""
    assert config.rope is not None
    return config.rope


def wide_specs(config: ModelConfig, *, dtype: DType = DType.F32, tied: bool | None = None) -> tuple[LayerSpec, ...]:
    return layer_specs(config, dtype=dtype, policy=ALL_WIDE, tied=tied)


def random_weights(
    config: ModelConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """A checkpoint with the family's usual names (fused as our own parameters are, which every family accepts)."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for spec in wide_specs(config):
        for param in spec.params:
            values = torch.randn(param.shape, generator=generator)
            weights[param.name] = (values * 0.1 + 1.0 if "norm" in param.name else values * 0.15).to(dtype)
    return weights


def fill(config: ModelConfig, specs: Sequence[LayerSpec], weights: Mapping[str, torch.Tensor]) -> DecoderModel:
    """The shell of `specs`, filled."""
    model = build_shell(config, specs)
    fill_shell(model, specs, weight_map(config), names=weights, get_tensor=weights.__getitem__)
    return model


def tiny_model(model_type: str = "llama", **changes: Any) -> DecoderModel:
    """A filled float32 model."""
    config = config_of(model_type, **changes)
    return fill(config, wide_specs(config), random_weights(config))


def context() -> StepContext:
    return StepContext(Kernels.detect())


def run(
    model: DecoderModel,
    *prompts: Sequence[int],
    caches: Sequence[KVCache] | None = None,
    ctx: StepContext | None = None,
) -> torch.Tensor:
    """Logits of every position of the prompts, as one batch: [tokens of all prompts, V]."""
    config = model.config
    if caches is None:
        caches = [new_cache(config, max_tokens=len(prompt)) for prompt in prompts]
    with torch.inference_mode():
        batch = make_batch(list(zip(prompts, caches, strict=True)), vocab_size=config.vocab_size)
        logits: torch.Tensor = model(batch, ctx or context())
        return logits


def new_cache(config: ModelConfig, *, max_tokens: int, dtype: DType = DType.F32) -> KVCache:
    return KVCache(config, max_tokens=max_tokens, dtype=dtype)


def some_ids(count: int, *, vocab_size: int = 101, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count,), generator=generator).tolist()

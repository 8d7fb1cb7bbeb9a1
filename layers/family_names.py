"""Which families and multimodal models there are, by name alone: only the one that is asked for is imported."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

FAMILY_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "cohere": ("CohereForCausalLM",),
    "deepseek_v2": ("DeepseekV2ForCausalLM",),
    "deepseek_v3": ("DeepseekV3ForCausalLM",),
    "gemma": ("GemmaForCausalLM",),
    "gemma2": ("Gemma2ForCausalLM",),
    "gemma3_text": ("Gemma3ForCausalLM",),
    "glm": ("GlmForCausalLM",),
    "glm4": ("Glm4ForCausalLM",),
    "gpt2": ("GPT2LMHeadModel",),
    "gpt_oss": ("GptOssForCausalLM",),
    "granite": ("GraniteForCausalLM",),
    "llama": ("LlamaForCausalLM", "LLaMAForCausalLM"),
    "mistral": ("MistralForCausalLM",),
    "mixtral": ("MixtralForCausalLM",),
    "olmo2": ("Olmo2ForCausalLM",),
    "olmoe": ("OlmoeForCausalLM",),
    "phi": ("PhiForCausalLM",),
    "phi3": ("Phi3ForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen2_moe": ("Qwen2MoeForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "qwen3_moe": ("Qwen3MoeForCausalLM",),
    "stablelm": ("StableLmForCausalLM",),
})  # fmt: skip
"""model_type -> architectures of the families of `layers.models`."""

MULTIMODAL_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "gemma3": ("Gemma3ForConditionalGeneration",),
    "llava": ("LlavaForConditionalGeneration",),
    "llava_next": ("LlavaNextForConditionalGeneration",),
    "mistral3": ("Mistral3ForConditionalGeneration",),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration",),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration",),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration",),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration",),
})  # fmt: skip
"""model_type -> architectures of the models of `layers.multimodal`."""

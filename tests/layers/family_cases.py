"""Tiny models of every family beyond Llama's form, as changes to the configuration that transformers builds them from.

Each choice that a family offers is taken at least once; windows are shorter than the longest prompt.
"""

from __future__ import annotations

from typing import Any

TANH = {"hidden_act": "gelu_pytorch_tanh"}
GEMMA2 = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 20, "num_hidden_layers": 3}
GEMMA3 = {
    "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 20, "num_hidden_layers": 4,
    "sliding_window_pattern": 3,
}  # fmt: skip
TWO_BASES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
}

LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "moe_intermediate_size": 24, "num_hidden_layers": 3,
}  # fmt: skip
LATENT_YARN = {
    "rope_type": "yarn", "factor": 4.0, "mscale": 0.9, "mscale_all_dim": 0.7, "rope_theta": 100.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

# name -> (model_type, changes)
FAMILY_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"tie_word_embeddings": True}),
    "gpt2 untied, square": ("gpt2", {"tie_word_embeddings": False, "n_inner": 48, "activation_function": "relu"}),
    "glm": ("glm", {"head_dim": 16, "attention_bias": True}),
    "glm all rotated, no bias": ("glm", {"head_dim": 16, "attention_bias": False, "partial_rotary_factor": 1.0}),
    "glm4": ("glm4", {"head_dim": 16, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
    "olmo2 bias, tied": ("olmo2", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "stablelm": ("stablelm", {"hidden_size": 64}),
    "stablelm parallel, norms, bias": ("stablelm", {
        "hidden_size": 64, "use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True,
        "tie_word_embeddings": True, "partial_rotary_factor": 0.5,
    }),
    "stablelm norms": ("stablelm", {"hidden_size": 64, "qk_layernorm": True}),
    "gemma": ("gemma", {"head_dim": 16, **TANH, "tie_word_embeddings": True}),
    "gemma bias, untied": ("gemma", {"head_dim": 20, **TANH, "attention_bias": True}),
    "gemma2": ("gemma2", {**GEMMA2, "tie_word_embeddings": True}),
    "gemma2 small caps": ("gemma2", {**GEMMA2, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma2 no caps": ("gemma2", {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3_text", {**GEMMA3, "tie_word_embeddings": True}),
    "gemma3 two bases": ("gemma3_text", {**GEMMA3, "rope_parameters": TWO_BASES, "final_logit_softcapping": 5.0}),
    "phi": ("phi", {"partial_rotary_factor": 0.5, "num_key_value_heads": 4, "hidden_size": 64}),
    "phi grouped, all rotated": ("phi", {"partial_rotary_factor": 1.0, "hidden_act": "gelu", "hidden_size": 64}),
    "granite": ("granite", {
        "embedding_multiplier": 3.7, "logits_scaling": 1.9, "residual_multiplier": 0.43, "attention_multiplier": 0.31,
        "tie_word_embeddings": True,
    }),
    "granite bias": ("granite", {"attention_bias": True, "mlp_bias": True, "attention_multiplier": 0.2}),
    "cohere": ("cohere", {"tie_word_embeddings": True, "logit_scale": 0.6}),
    "cohere norms, bias": ("cohere", {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.7,
                                      "tie_word_embeddings": True}),
    "gpt_oss": ("gpt_oss", {
        "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 6, "num_hidden_layers": 3,
        "swiglu_limit": 1.5, "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0, "truncate": False,
            "original_max_position_embeddings": 16,
        },
    }),
    "gpt_oss square, no attention bias": ("gpt_oss", {
        "num_local_experts": 4, "num_experts_per_tok": 4, "head_dim": 12, "intermediate_size": 48,
        "attention_bias": False, "swiglu_alpha": 1.1, "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 3, "tie_word_embeddings": True,
    }),
    "deepseek_v2": ("deepseek_v2", {
        **LATENT, "q_lora_rank": None, "n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "topk_method": "greedy", "routed_scaling_factor": 1.7,
    }),
    "deepseek_v2 groups, yarn, bias": ("deepseek_v2", {
        **LATENT, "q_lora_rank": 28, "v_head_dim": 24, "n_routed_experts": 12, "num_experts_per_tok": 4,
        "n_shared_experts": 1, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
        "attention_bias": True, "rope_parameters": LATENT_YARN,
    }),
    "deepseek_v3": ("deepseek_v3", {
        **LATENT, "q_lora_rank": 28, "n_routed_experts": 12, "num_experts_per_tok": 4, "n_shared_experts": 1,
        "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "rope_parameters": LATENT_YARN,
    }),
    "deepseek_v3 one group, bias, halves": ("deepseek_v3", {
        **LATENT, "q_lora_rank": None, "n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 2,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2, "norm_topk_prob": False, "attention_bias": True,
        "rope_interleave": False, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
    }),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6}),
    "qwen2_moe": ("qwen2_moe", {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
        "num_hidden_layers": 3, "mlp_only_layers": [1],
    }),
    "qwen2_moe renormalized, no bias": ("qwen2_moe", {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 24,
        "norm_topk_prob": True, "qkv_bias": False, "decoder_sparse_step": 2,
    }),
    "qwen3_moe": ("qwen3_moe", {
        "num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16,
        "norm_topk_prob": True,
    }),
    "qwen3_moe plain scores": ("qwen3_moe", {
        "num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 20, "head_dim": 16,
        "mlp_only_layers": [0], "attention_bias": True,
    }),
    "olmoe": ("olmoe", {"num_experts": 5, "num_experts_per_tok": 3, "tie_word_embeddings": True}),
    "olmoe renormalized": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 1, "norm_topk_prob": True}),
}  # fmt: skip

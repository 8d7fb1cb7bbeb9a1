"""gpt-oss: sparse layers of clamped experts with biases, attention with sinks, a window in every other layer."""

from __future__ import annotations

from dataclasses import replace

from layers.config_fields import Fields
from layers.decoder_config import Biases, Defaults, read_decoder, read_heads, read_length, read_windows
from layers.family import Family
from layers.model_config import ClampedSwiGLU, ModelConfig, NormKind, RopeConfig
from layers.moe_config import read_moe
from layers.rope_config import read_rope
from layers.weight_rules import expert_weight_map
from layers.weights import Rename, WeightMap

DEFAULTS = Defaults(rms_norm_eps=1e-5, max_position_embeddings=131_072, bos_token_id=None, eos_token_id=None)
DEFAULT_KV_HEADS = 8
DEFAULT_HEAD_DIM = 64
DEFAULT_WINDOW = 128
DEFAULT_THETA = 150_000.0
DEFAULT_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
ROTARY_KEYS = ("rope_scaling", "rope_parameters")


def read_config(fields: Fields) -> ModelConfig:
    """The first layer and every second one from there have the window; `intermediate_size` is the experts'.

    The experts' activation is always the clamped one, whatever `hidden_act` says.
    """
    heads = read_heads(fields, kv_default=DEFAULT_KV_HEADS, head_dim_default=DEFAULT_HEAD_DIM)
    bias = fields.flag("attention_bias", default=True)
    window = fields.optional_int("sliding_window") if fields.has("sliding_window") else DEFAULT_WINDOW
    config = read_decoder(
        fields,
        model_type=FAMILY.model_type,
        architecture=FAMILY.architectures[0],
        heads=heads,
        rope=_rope(fields, heads.head_dim),
        defaults=DEFAULTS,
        biases=Biases(qkv=bias, o=bias),
        windows=read_windows(fields, window=window, full_every=2),
    )
    moe = read_moe(fields, experts=128, top_k=4, intermediate_size=config.intermediate_size, renormalize=True)
    clamped = ClampedSwiGLU(fields.number("swiglu_limit", default=7.0), fields.number("swiglu_alpha", default=1.702))
    moe = replace(moe, softmax_chosen=True, router_bias=True, expert_bias=True, clamped=clamped)
    return replace(config, norm=NormKind.RMS_FLOAT32, attention_sinks=True, moe=moe)


def _rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Where there are no settings at all, they are yarn's of the published models."""
    if not any(fields.section(key) for key in ROTARY_KEYS):
        fields = fields.changed({"rope_parameters": DEFAULT_YARN})
    length = read_length(fields, DEFAULTS)
    return read_rope(fields, head_dim=head_dim, max_position_embeddings=length, theta_default=DEFAULT_THETA)


def weight_map(config: ModelConfig) -> WeightMap:
    """Experts lie [in, out], outputs of gate and up in turns; where they are MXFP4, [out, in], in turns as well."""
    shared = expert_weight_map(config)
    return replace(
        shared,
        substrings=(*shared.substrings, Rename(".mlp.router.", ".mlp.gate.")),
        fused_transposed=True,
        fused_interleaved=True,
    )


FAMILY = Family("gpt_oss", ("GptOssForCausalLM",), read_config, weight_map)

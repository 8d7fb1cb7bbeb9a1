"""GPT-2: learned positions, layer norms, a plain MLP, and matrices that are stored [in, out]."""

from __future__ import annotations

import re
from dataclasses import replace

from layers.config_fields import Fields
from layers.decoder_config import Biases, Defaults, read_decoder, read_depth, read_heads, read_length
from layers.errors import ModelConfigError
from layers.family import Family
from layers.model_config import MLPKind, ModelConfig, NormKind
from layers.weight_rules import decoder_weight_map
from layers.weights import Rename, WeightMap

DEFAULTS = Defaults(
    rms_norm_eps=1e-5, max_position_embeddings=1024, bos_token_id=50_256, eos_token_id=50_256,
    tie_word_embeddings=True, hidden_act="gelu_new",
)  # fmt: skip
KEYS = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "intermediate_size": "n_inner", "max_position_embeddings": "n_positions", "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}  # fmt: skip
MODULES = {
    "wte": "model.embed_tokens", "wpe": "model.layers.0.embed_positions", "ln_f": "model.norm",
    "h.*.ln_1": "model.layers.*.input_layernorm", "h.*.attn.c_attn": "model.layers.*.self_attn.qkv_proj",
    "h.*.attn.c_proj": "model.layers.*.self_attn.o_proj", "h.*.ln_2": "model.layers.*.post_attention_layernorm",
    "h.*.mlp.c_fc": "model.layers.*.mlp.fc1", "h.*.mlp.c_proj": "model.layers.*.mlp.fc2",
}  # fmt: skip
# The reference makes these of a class "Conv1D", whose matrices are [in, out].
CONV1D = (re.compile(r"\.(qkv_proj|o_proj|fc1|fc2)\.weight$"),)


def read_config(fields: Fields) -> ModelConfig:
    """`n_inner` is 4 times `n_embd` where it is absent or null."""
    fields = _common(fields)
    return replace(
        read_decoder(
            fields,
            model_type=FAMILY.model_type,
            architecture=FAMILY.architectures[0],
            heads=read_heads(fields),
            rope=None,
            defaults=DEFAULTS,
            biases=Biases(qkv=True, o=True, mlp=True),
            windows=(None,) * read_depth(fields),
        ),
        norm=NormKind.LAYER,
        norm_bias=True,
        mlp=MLPKind.PLAIN,
        learned_positions=read_length(fields, DEFAULTS),
    )


def _common(fields: Fields) -> Fields:
    """The keys by their usual names. Other ways of scaling the scores are refused."""
    fields = fields.renamed(KEYS).changed({"num_key_value_heads": None, "head_dim": None})  # it knows no such keys
    for key, usual in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False),
                       ("add_cross_attention", False)):  # fmt: skip
        if fields.flag(key, default=usual) is not usual:
            raise ModelConfigError(f"{fields.where}: {key} = {str(not usual).lower()} is not supported")
    if fields.raw.get("intermediate_size") is None:
        fields = fields.changed({"intermediate_size": 4 * fields.positive_int("hidden_size")})
    return fields


def weight_map(config: ModelConfig) -> WeightMap:
    """Names with and without the leading `transformer.`."""
    rules = [Rename(start + theirs, ours) for start in ("transformer.", "") for theirs, ours in MODULES.items()]
    return replace(decoder_weight_map(config), structure=tuple(rules), transposed=CONV1D)


FAMILY = Family("gpt2", ("GPT2LMHeadModel",), read_config, weight_map)

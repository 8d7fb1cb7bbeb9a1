"""The twin of config.json from a GGUF's metadata, in Hugging Face's keys. [no-torch]

Sources: the keys, llama.cpp's gguf-py/gguf/constants.py; their defaults, `llama_model::load_hparams` there; how each
family's config.json became metadata, convert_hf_to_gguf.py.

Llama 3's stretched rotary frequencies are not metadata: their divisors, one for each pair of rotary dims, lie in the
tensor rope_freqs.weight. They come as `rope_freq_factors`: inverse frequency i is divided by factor i.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from math import isfinite, log
from typing import Any

from quant.dtypes import DType
from streaming.checkpoint.gguf import GgufHeader
from streaming.checkpoint.gguf_families import GGUF_FAMILIES, GgufFamily
from streaming.checkpoint.gguf_keys import GgufSource
from streaming.checkpoint.gguf_names import ROPE_FREQS, ROPE_LONG, ROPE_SHORT
from streaming.checkpoint.tensors import TensorInfo
from streaming.errors import CheckpointError, CheckpointFormatError

_DEFAULT_THETA = 10000.0


def gguf_architecture(header: GgufHeader) -> str:
    """The architecture, if it is one that can be read; CheckpointError listing those otherwise."""
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise CheckpointError(f"{header.file}: holds a GGUF {kind!r}, not a model")
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointFormatError(f"{header.file}: metadata key general.architecture is {architecture!r}, not a name")
    if architecture not in GGUF_FAMILIES:
        raise CheckpointError(
            f"{header.file}: GGUF architecture {architecture!r} is not supported; known are {', '.join(GGUF_FAMILIES)}"
        )
    if header.metadata.get(f"{architecture}.expert_count"):
        raise CheckpointError(f"{header.file}: mixtures of experts are not supported as GGUF yet")
    return architecture


def gguf_config(header: GgufHeader, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """config.json's twin. `tensors`: those of all the model's files, by GGUF's names.

    Raises CheckpointFormatError for keys that are missing or hold what cannot be.
    """
    source = GgufSource(header.file, gguf_architecture(header), header.metadata, tensors)
    family = GGUF_FAMILIES[source.architecture]
    sizes = _sizes(source)
    return {
        "model_type": family.model_type,
        "architectures": [family.model_class],
        **sizes,
        **_rotary(source, sizes["head_dim"]),
        **_tokens(source),
        "hidden_act": "silu",
        **_epsilon(source, family),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "torch_dtype": _dtype(tensors),
        **family.extras(source, sizes),
    }


def _epsilon(source: GgufSource, family: GgufFamily) -> dict[str, float]:
    if family.layer_norms:
        return {"layer_norm_eps": source.real("attention.layer_norm_epsilon")}
    return {"rms_norm_eps": source.real("attention.layer_norm_rms_epsilon")}


def _sizes(source: GgufSource) -> dict[str, Any]:
    hidden, heads = source.size("embedding_length"), source.size("attention.head_count")
    head_dim = source.size("attention.key_length", default=hidden // heads)
    value_dim = source.size("attention.value_length", default=hidden // heads)
    if head_dim != value_dim:
        raise source.fault("attention.value_length", f"is {value_dim}, but keys have {head_dim} dims; both must agree")
    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": source.size("feed_forward_length"),
        "num_hidden_layers": source.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.size("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "max_position_embeddings": source.size("context_length"),
        "vocab_size": source.size("vocab_size", default=_vocab_rows(source)),
    }
    return sizes


def _vocab_rows(source: GgufSource) -> int | None:
    embedding = source.tensors.get("token_embd.weight")
    return embedding.shape[0] if embedding else None


def _tokens(source: GgufSource) -> dict[str, Any]:
    """Token ids; where a chat's turns end with a token of their own, both end a text."""
    found = {key: _token_id(source, key) for key in ("bos", "eos", "eot", "padding")}
    ends = [found["eos"]] if found["eot"] in (None, found["eos"]) else [found["eos"], found["eot"]]
    ends = [end for end in ends if end is not None]
    return {
        "bos_token_id": found["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else (ends or None),
        "pad_token_id": found["padding"],
    }


def _token_id(source: GgufSource, which: str) -> int | None:
    key = f"tokenizer.ggml.{which}_token_id"
    token = source.metadata.get(key)
    if token is not None and (type(token) is not int or token < 0):
        raise CheckpointFormatError(f"{source.file}: metadata key {key} is {token!r}, not a token id")
    return token


def _rotary(source: GgufSource, head_dim: int) -> dict[str, Any]:
    rotary_dim = source.size("rope.dimension_count", default=head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise source.fault("rope.dimension_count", f"is {rotary_dim}: not an even number up to head_dim {head_dim}")
    if rotary_dim != head_dim and GGUF_FAMILIES[source.architecture].interleaved:
        raise source.fault(
            "rope.dimension_count", f"is {rotary_dim}, but {source.architecture} rotates all {head_dim} dims of a head"
        )
    config: dict[str, Any] = {
        "rope_theta": source.real("rope.freq_base", default=_DEFAULT_THETA),
        "rope_scaling": _scaling(source, rotary_dim // 2),
    }
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    if source.find("rope.scaling.original_context_length") is not None:
        config["original_max_position_embeddings"] = source.size("rope.scaling.original_context_length")
    if ROPE_FREQS in source.tensors:
        config["rope_freq_factors"] = _factors(source, ROPE_FREQS, rotary_dim // 2)
    return config


def _scaling(source: GgufSource, pairs: int) -> dict[str, Any] | None:
    """config.json's rope_scaling; None for plain rotary embeddings."""
    if ROPE_LONG in source.tensors or ROPE_SHORT in source.tensors:
        return _longrope(source, pairs)
    kind = source.find("rope.scaling.type")
    factor_key = "rope.scaling.factor" if source.find("rope.scaling.factor") is not None else "rope.scale_linear"
    factor = source.real(factor_key, default=1.0) if source.find(factor_key) else 1.0  # 0 stands for "not scaled"
    if kind in (None, "linear"):
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    if kind == "none":
        return None
    if kind == "yarn":
        return _yarn(source, factor)
    raise source.fault("rope.scaling.type", f"is {kind!r}; known are none, linear, yarn, longrope with its tensors")


def _yarn(source: GgufSource, factor: float) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": source.size(
            "rope.scaling.original_context_length", default=source.size("context_length")
        ),
    }
    attention = source.find("rope.scaling.attn_factor")
    if attention is not None:  # llama.cpp multiplies YaRN's own 1 + 0.1 ln(factor) by it; here it is the whole
        scaling["attention_factor"] = source.real("rope.scaling.attn_factor") * (1 + 0.1 * log(factor))
    for key, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if source.find(f"rope.scaling.{key}") is not None:
            scaling[ours] = source.real(f"rope.scaling.{key}")
    return scaling


def _longrope(source: GgufSource, pairs: int) -> dict[str, Any]:
    context = source.size("context_length")
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": _factors(source, ROPE_SHORT, pairs),
        "long_factor": _factors(source, ROPE_LONG, pairs),
        "original_max_position_embeddings": source.size("rope.scaling.original_context_length", default=context),
    }
    if source.find("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = source.real("rope.scaling.attn_factor")
    return scaling


def _factors(source: GgufSource, name: str, count: int) -> list[float]:
    """The numbers of one of the small rotary tensors; [count] float32."""
    info = source.tensors.get(name)
    if info is None:
        raise CheckpointFormatError(
            f"{source.file}: tensor {name!r} is missing; its long and short twins come together"
        )
    if info.shape != (count,) or info.dtype is not DType.F32 or info.encoding is not None:
        raise CheckpointFormatError(
            f"{info.file}: tensor {name!r} is {info.dtype.value} {list(info.shape)}, expected F32 [{count}]"
        )
    from streaming.file_ranges import open_ranges

    with closing(open_ranges(info.file)) as ranges:
        (raw,) = ranges.read([(info.offset, info.nbytes)])
    values = struct.unpack(f"{'>' if info.big_endian else '<'}{count}f", raw)
    if not all(isfinite(value) and value > 0 for value in values):
        raise CheckpointFormatError(f"{info.file}: tensor {name!r} holds values that are not above 0")
    return list(values)


def _dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """What to compute in: the matrices' most frequent dtype by bytes; bfloat16 where they are kept in blocks."""
    nbytes: Counter[str] = Counter()
    for info in tensors.values():
        if len(info.shape) > 1:
            nbytes["bfloat16" if info.encoding else info.dtype.torch_name] += info.nbytes
    return nbytes.most_common(1)[0][0] if nbytes else "float32"

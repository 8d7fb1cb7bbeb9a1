"""Write a tiny checkpoint of random numbers in the Hugging Face layout: something to stream without a download.

usage: python examples/write_tiny_model.py FOLDER [--family qwen3] [--layers 4] [--tied] [--files 3] [--seed 0] ...

Then, for example: firstlayer generate FOLDER --ids 1,2,3 --max-tokens 8. The numbers of a tensor depend on the seed and
on its own name only, and are scaled so that the logits differ clearly: greedy decoding is a stable thing to compare.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
}
NO_HEAD_DIM = ("phi3", "olmo2")  # it is hidden_size / heads
_NORMS_ROUND = (  # before the attention, between it and the feed-forward part, behind that
    ("input_layernorm",), ("post_attention_layernorm", "pre_feedforward_layernorm"), ("post_feedforward_layernorm",),
)  # fmt: skip
_NORMS_BEFORE = (("input_layernorm",), ("post_attention_layernorm",), ())
_NORMS = {
    "gemma2": _NORMS_ROUND,
    "gemma3_text": _NORMS_ROUND,
    "olmo2": ((), ("post_attention_layernorm",), ("post_feedforward_layernorm",)),
}
_OWN_KEYS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "phi3": {"original_max_position_embeddings": 512, "rope_scaling": None},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16, "sliding_window": 64,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16, "sliding_window": 64,
        "sliding_window_pattern": 2, "rope_local_base_freq": 10000.0,
    },
    "granite": {
        "embedding_multiplier": 12.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 4.0,
    },
}  # fmt: skip


@dataclass(frozen=True)
class TinyModel:
    """What to write. `tied`: the head is the embedding, so no head is stored. `files`: how many parts, with an index
    where there is more than one."""

    family: str = "llama"
    layers: int = 3
    hidden_size: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 96
    vocab_size: int = 160
    tied: bool = False
    dtype: str = "bfloat16"
    files: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.family not in ARCHITECTURES:
            raise ValueError(f"family {self.family!r} is not one of {', '.join(ARCHITECTURES)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.family in NO_HEAD_DIM and self.heads * self.head_dim != self.hidden_size:
            raise ValueError(
                f"{self.family}: heads ({self.heads}) x head_dim ({self.head_dim}) must be {self.hidden_size}"
            )
        tensors = len(list(tensor_shapes(self)))
        if not 1 <= self.files <= tensors:
            raise ValueError(f"files ({self.files}) must be between 1 and the number of tensors ({tensors})")


def write_tiny_model(folder: Path, *, model: TinyModel) -> Path:
    """Write config.json and the safetensors files into the folder (made if missing), and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config_of(model))
    weight_map: dict[str, str] = {}
    groups = _groups(model)
    for number, names in enumerate(groups, start=1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        tensors = {tensor: random_tensor(tensor, shape=shape, model=model) for tensor, shape in names.items()}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, name)
    if len(groups) > 1:
        total = sum(_nbytes(shape, model.dtype) for names in groups for shape in names.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)
    return folder


def config_of(model: TinyModel) -> dict[str, Any]:
    """The config.json, in the spelling that most published checkpoints have."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model.family]],
        "model_type": model.family,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": model.dtype,
    }
    if model.family in ("qwen2", "qwen3"):
        config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": model.layers}
    if model.family in NO_HEAD_DIM:
        del config["head_dim"]
        config["pad_token_id"] = 0
    return config | _OWN_KEYS.get(model.family, {})


def tensor_shapes(model: TinyModel) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's name and shape, in the order in which the model uses them. Linear weights are [out, in]."""
    hidden, q, kv = model.hidden_size, model.heads * model.head_dim, model.kv_heads * model.head_dim
    before, between, behind = _NORMS.get(model.family, _NORMS_BEFORE)
    yield "model.embed_tokens.weight", (model.vocab_size, hidden)
    for number in range(model.layers):
        prefix = f"model.layers.{number}."
        yield from ((f"{prefix}{norm}.weight", (hidden,)) for norm in before)
        if model.family == "phi3":
            yield f"{prefix}self_attn.qkv_proj.weight", (q + 2 * kv, hidden)
        else:
            for part, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
                yield f"{prefix}self_attn.{part}.weight", (rows, hidden)
                if model.family == "qwen2":
                    yield f"{prefix}self_attn.{part}.bias", (rows,)
        if model.family in ("qwen3", "gemma3_text", "olmo2"):
            over_all = model.family == "olmo2"
            yield f"{prefix}self_attn.q_norm.weight", (q if over_all else model.head_dim,)
            yield f"{prefix}self_attn.k_norm.weight", (kv if over_all else model.head_dim,)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, q)
        yield from ((f"{prefix}{norm}.weight", (hidden,)) for norm in between)
        if model.family == "phi3":
            yield f"{prefix}mlp.gate_up_proj.weight", (2 * model.intermediate_size, hidden)
        else:
            yield f"{prefix}mlp.gate_proj.weight", (model.intermediate_size, hidden)
            yield f"{prefix}mlp.up_proj.weight", (model.intermediate_size, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, model.intermediate_size)
        yield from ((f"{prefix}{norm}.weight", (hidden,)) for norm in behind)
    yield "model.norm.weight", (hidden,)
    if not model.tied:
        yield "lm_head.weight", (model.vocab_size, hidden)


def random_tensor(name: str, *, shape: tuple[int, ...], model: TinyModel) -> torch.Tensor:
    """The tensor's numbers: norms around 1 (Gemma counts them from 1, so around 0), biases around 0, the embedding
    N(0, 1), weights N(0, 1 / in_features)."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{model.seed} {name}".encode()))
    numbers = torch.randn(shape, generator=generator, dtype=torch.float32)
    if "norm" in name:
        numbers = (0 if model.family.startswith("gemma") else 1) + 0.1 * numbers
    elif name.endswith(".bias"):
        numbers = 0.1 * numbers
    elif "embed_tokens" not in name:
        numbers = numbers / shape[1] ** 0.5
    return numbers.to(getattr(torch, model.dtype))


def _groups(model: TinyModel) -> list[dict[str, tuple[int, ...]]]:
    """The tensors dealt in order to the files, about the same number of bytes to each and none left empty."""
    shapes = dict(tensor_shapes(model))
    total = sum(_nbytes(shape, model.dtype) for shape in shapes.values())
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    done, left = 0, len(shapes)
    for name, shape in shapes.items():
        missing = model.files - len(groups)
        full = done >= total * len(groups) / model.files
        if groups[-1] and missing and (full or left <= missing):
            groups.append({})
        groups[-1][name] = shape
        done += _nbytes(shape, model.dtype)
        left -= 1
    return groups


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    itemsize: int = getattr(torch, dtype).itemsize
    return prod(shape) * itemsize


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Write a tiny random checkpoint in the Hugging Face layout.")
    parser.add_argument("folder", type=Path)
    for option in fields(TinyModel):
        flag = f"--{option.name.replace('_', '-')}"
        if option.name == "tied":
            parser.add_argument(flag, action="store_true", help="the head is the embedding")
        elif option.name == "family":
            parser.add_argument(flag, choices=ARCHITECTURES, default=option.default)
        else:
            parser.add_argument(flag, type=type(option.default), default=option.default, help=f"[{option.default}]")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    folder = options.pop("folder")
    try:
        write_tiny_model(folder, model=TinyModel(**options))
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


if __name__ == "__main__":
    main()

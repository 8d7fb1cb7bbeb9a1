"""Small checkpoints for these tests, good ones and broken ones, written by the formats' own packages or by hand."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8}
INDEX = "model.safetensors.index.json"

Arrays = Mapping[str, np.ndarray[Any, Any]]


def array(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Random float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def safetensors_bytes(header: Mapping[str, Any] | bytes, data: bytes = b"") -> bytes:
    """A file with that header, written by hand: nothing in it has to be right."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: list[Any], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    """One tensor of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_folder(
    root: Path, files: Mapping[str, Arrays], *, index: Mapping[str, str] | None = None, config: Any = CONFIG
) -> Path:
    """A model folder: a safetensors file for each name, and an index where one is given."""
    root.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), root / name)
    if index is not None:
        (root / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    if config is not None:
        (root / "config.json").write_text(json.dumps(config))
    return root


LLAMA_KEYS: Mapping[str, Any] = {
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.block_count": 1,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 128,
    "llama.rope.freq_base": 500000.0,
    "llama.vocab_size": 40,
    "tokenizer.ggml.tokens": [f"token {i}" for i in range(40)],
    "tokenizer.ggml.scores": [float(-i) for i in range(40)],
    "tokenizer.ggml.token_type": [1] * 40,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.add_bos_token": True,
}


def llama_tensors() -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a one-layer llama with tied embeddings, by GGUF's names."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (40, 64),
        "output_norm.weight": (64,),
        "blk.0.attn_norm.weight": (64,),
        "blk.0.attn_q.weight": (64, 64),
        "blk.0.attn_k.weight": (32, 64),
        "blk.0.attn_v.weight": (32, 64),
        "blk.0.attn_output.weight": (64, 64),
        "blk.0.ffn_norm.weight": (64,),
        "blk.0.ffn_gate.weight": (96, 64),
        "blk.0.ffn_up.weight": (96, 64),
        "blk.0.ffn_down.weight": (64, 96),
    }
    return {name: array(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    keys: Mapping[str, Any] = LLAMA_KEYS,
    tensors: Arrays | None = None,
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    stored: Mapping[str, str] | None = None,
    big_endian: bool = False,
) -> Path:
    """A GGUF file by the gguf package's writer; `types` quantizes the named tensors, `stored` says which type's
    blocks their bytes already are. Little-endian quantized only."""
    order = gguf.GGUFEndian.BIG if big_endian else gguf.GGUFEndian.LITTLE
    writer = gguf.GGUFWriter(path, architecture, endianess=order)
    for key, value in keys.items():
        _add_key(writer, key, value)
    for name, values in (llama_tensors() if tensors is None else tensors).items():
        kind = (types or {}).get(name)
        if stored and name in stored:
            writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType[stored[name]])
        elif kind is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def text(value: str | bytes) -> bytes:
    """A GGUF string."""
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, value_type: int, value: bytes) -> bytes:
    """A GGUF metadata pair."""
    return text(key) + struct.pack("<I", value_type) + value


def tensor_entry(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    """A GGUF tensor's entry; dims innermost first."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_bytes(
    pairs: list[bytes] | None = None,
    entries: list[bytes] | None = None,
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A GGUF file written by hand: nothing in it has to be right. `counts`: tensors, pairs."""
    pairs, entries = pairs or [], entries or []
    tensor_count, pair_count = counts or (len(entries), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, pair_count) + b"".join(pairs) + b"".join(entries)
    return head + bytes(-len(head) % 32) + data

"""What is fuzzed: every parser of strangers' files, with small valid files to begin from. Needs no torch.

A target takes a path and may raise the project's own errors only. `run_target` also bounds the memory: what a file of N
bytes makes this process allocate stays below 10 N + 64 MiB.
"""

from __future__ import annotations

import io
import json
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from layers.config import parse_config
from layers.errors import ModelConfigError
from streaming.checkpoint.files import read_json_object
from streaming.checkpoint.gguf_model import open_gguf_file
from streaming.checkpoint.index import read_index
from streaming.checkpoint.pickles import read_pickle_header
from streaming.checkpoint.safetensors import read_safetensors_header
from streaming.errors import StreamingError
from tests.fuzz import other_parsers as other
from tests.fuzz import quantization_parsers as quantization

ALLOWED = (StreamingError, ModelConfigError)
SPARE_NBYTES = 64 << 20


@dataclass(frozen=True)
class Parser:
    """One way into the project for a stranger's file: its suffix, files to begin from, and what reads it."""

    suffix: str
    seeds: tuple[bytes, ...]
    read: Callable[[Path], object]


def run_target(parser: Parser, content: bytes, folder: Path) -> None:
    """Read `content` as that kind of file. Raises whatever is not the project's own error, and MemoryError when it
    took too much."""
    path = folder / f"fuzzed{parser.suffix}"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        parser.read(path)
    except ALLOWED as error:
        if not str(error):
            raise AssertionError(f"{type(error).__name__} without words") from error
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    if peak > 10 * len(content) + SPARE_NBYTES:
        raise MemoryError(f"{len(content)} bytes of {parser.suffix} made it allocate {peak} bytes")


def _safetensors(header: Mapping[str, object], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


_TENSOR = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
_HALF = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}
_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 128, "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 64},
}  # fmt: skip


def _json(*files: Mapping[str, object]) -> tuple[bytes, ...]:
    return tuple(json.dumps(file).encode() for file in files)


def _gguf(*, order: str) -> bytes:
    """One tensor, and metadata of a string, a number and an array."""

    def text(value: bytes) -> bytes:
        return struct.pack(f"{order}Q", len(value)) + value

    pairs = text(b"general.architecture") + struct.pack(f"{order}I", 8) + text(b"llama")
    pairs += text(b"llama.block_count") + struct.pack(f"{order}II", 4, 1)
    pairs += text(b"tokenizer.ggml.tokens") + struct.pack(f"{order}IIQ", 9, 8, 2) + text(b"a") + text(b"b")
    tensor = text(b"token_embd.weight") + struct.pack(f"{order}IQQIQ", 2, 32, 2, 8, 0)
    head = b"GGUF" + struct.pack(f"{order}IQQ", 3, 1, 3) + pairs + tensor
    return head + bytes(-len(head) % 32) + bytes(68)


def _pickle(*, legacy: bool) -> bytes:
    """{"x": two of four numbers} as torch.save describes it."""
    view = b"N" if legacy else b""
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0000X\x03\0\0\0cpuK\x04" + view + b"tQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x01K\x02\x85K\x01\x85\x89N"
    return b"\x80\x02}q\x00X\x01\0\0\0x" + tensor + b"tRs."


def _torch_zip() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        members = {"data.pkl": _pickle(legacy=False), "byteorder": b"little", "data/0": bytes(16), "version": b"3"}
        for name, content in members.items():
            archive.writestr(f"model/{name}", content)
    return out.getvalue()


def _torch_legacy() -> bytes:
    magic = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
    keys = b"\x80\x02]X\x01\0\0\x000a."
    return magic + b"\x80\x02M\xe9\x03.\x80\x02}." + _pickle(legacy=True) + keys + struct.pack("<Q", 4) + bytes(16)


PARSERS: Mapping[str, Parser] = MappingProxyType(
    {
        "safetensors": Parser(
            ".safetensors",
            (_safetensors({"a": _TENSOR, "b": _HALF, "__metadata__": {"format": "pt"}}, bytes(32)),),
            read_safetensors_header,
        ),
        "index": Parser(
            ".json",
            (json.dumps({"metadata": {"total_size": 1}, "weight_map": {"a": "model-1.safetensors"}}).encode(),),
            read_index,
        ),
        "gguf": Parser(".gguf", (_gguf(order="<"), _gguf(order=">")), open_gguf_file),
        "pickles": Parser(".bin", (_torch_zip(), _torch_legacy()), read_pickle_header),
        "config": Parser(".json", (json.dumps(_CONFIG).encode(),), lambda path: parse_config(read_json_object(path))),
        "mistral_params": Parser(".json", _json(other.MISTRAL_PARAMS, other.META_PARAMS), other.read_mistral_params),
        "shards": Parser(".json", _json(other.SHARDS), other.read_shards),
        "tensorizer": Parser(
            ".tensors",
            (other.tensorizer_file(), other.tensorizer_file(version=2)),
            other.read_tensorizer,
        ),
        "tekken": Parser(".json", (other.tekken(),), other.read_tekken),
        "tokenizer_config": Parser(".json", _json(other.TOKENIZER_CONFIG), other.read_tokenizer_files),
        "generation_config": Parser(".json", _json(other.GENERATION_CONFIG), other.read_generation),
        "gguf_tokenizer": Parser(
            ".json", _json(other.GGUF_TOKENIZER, other.GGUF_BYTE_LEVEL), other.read_gguf_tokenizer
        ),
        "npcache": Parser(".safetensors", (other.CACHE,), other.read_cache),
        "options": Parser(".txt", other.OPTIONS, other.read_options),
        "stated_quantization": Parser(".json", _json(*quantization.CONFIGS), quantization.read_stated_quantization),
        "quantization_rules": Parser(".json", _json(quantization.RULES), quantization.read_rules),
    }
)

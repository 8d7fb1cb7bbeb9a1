"""More of what is fuzzed: files that need others beside them, tokenizers' files, and what users write as options.

Each function reads one file as `tests.fuzz.parsers` calls it, by the names that the project looks for.
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

from layers.config import parse_config
from layers.config_fields import Fields
from streaming.checkpoint.file_kinds import SAFETENSORS_KIND
from streaming.checkpoint.files import read_json_object
from streaming.checkpoint.folder import open_weights_folder
from streaming.checkpoint.hub import parse_hub_id
from streaming.checkpoint.mistral_config import mistral_config
from streaming.checkpoint.npcache import open_cached
from streaming.checkpoint.tensorizer_file import read_tensorizer_header
from streaming.generation_config import defaults_from_configs
from streaming.gguf_tokenizer import gguf_recipe
from streaming.loader_options import parse_loader_options
from streaming.remote.address import check_address, is_address
from streaming.sharded import MANIFEST, read_manifest
from streaming.sizes import parse_size
from streaming.sources import parse_source
from streaming.tekken import tekken_recipe
from streaming.tokenizer_config import read_tokenizer_settings

MISTRAL_PARAMS: Mapping[str, object] = {
    "dim": 64, "n_layers": 1, "head_dim": 16, "hidden_dim": 96, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-05,
    "vocab_size": 40, "rope_theta": 1e6, "sliding_window": 32,
    "yarn": {"factor": 4, "original_max_position_embeddings": 64, "alpha": 1, "beta": 32, "apply_scale": False},
}  # fmt: skip
META_PARAMS: Mapping[str, object] = {
    "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1, "ffn_dim_multiplier": 1.3,
    "multiple_of": 32, "norm_eps": 1e-05, "rope_theta": 500000.0, "use_scaled_rope": True,
}  # fmt: skip
SHARDS: Mapping[str, object] = {
    "format": "firstlayer shards", "version": 3, "tensor_parallel_size": 1, "expert_parallel_size": 1,
    "pipeline_parallel_size": 1, "expert_placement": "linear", "expert_map": [[0, 1]],
    "quantization": "none", "quantize_head": False, "dtype": "bfloat16", "tied": False, "source": "0a",
    "files": [{"name": "model-rank-00000-part-00000.safetensors", "nbytes": 9, "sha256": "0a"}],
    "weights": {"lm_head.weight": {"scheme": {"class": "IntPerGroup", "scale_dtype": "F16"}, "runs": [1]}},
    "kv_scales": [[0.5, 1]],
}  # fmt: skip
TOKENIZER_CONFIG: Mapping[str, object] = {
    "bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True, "add_eos_token": None,
    "added_tokens_decoder": {"3": {"content": "<x>", "special": True}},
    "chat_template": [{"name": "default", "template": "{{ bos_token }}"}],
}  # fmt: skip
GENERATION_CONFIG: Mapping[str, object] = {
    "eos_token_id": [1, 2], "bos_token_id": 0, "do_sample": True, "temperature": 0.6, "top_k": 50, "top_p": 0.9,
    "min_p": 0, "repetition_penalty": 1.1,
}  # fmt: skip
GGUF_TOKENIZER: Mapping[str, object] = {
    "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<0x00>", "a", "b", "ab"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, 0.0, -1.0, -2.0, -3.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 6, 1, 1, 1], "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_bos_token": True, "tokenizer.chat_template": "{{ x }}",
    "general.sampling.temp": 0.5,
}  # fmt: skip
GGUF_BYTE_LEVEL: Mapping[str, object] = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.token_type": [1, 1, 1],
}  # fmt: skip
CACHE_HEADER = b'{"x":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}'
CACHE = struct.pack("<Q", len(CACHE_HEADER)) + CACHE_HEADER + bytes(16)
OPTIONS = (
    b'{"enable_multithread_load": true, "num_threads": 8, "enable_weights_track": false}',
    b"encoder@main=model.encoder.,*.safetensors,x*.bin", b"1.5GiB", b"owner/name/file.gguf@v1.0",
    b"https://host:80/a%20b/", b"s3://bucket/model.safetensors",
)  # fmt: skip


def tekken() -> bytes:
    """Every byte, one token of two, and a named special token."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"ab"]
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(tokens)]
    config = {"pattern": "\\S+", "default_vocab_size": 259, "default_num_special_tokens": 2}
    found = {"special_tokens": [{"rank": 0, "token_str": "<s>"}], "config": config, "vocab": vocab}
    return json.dumps(found, separators=(",", ":")).encode()


def tensorizer_file(*, version: int = 5) -> bytes:
    """One tensor of two float32 numbers; version 5 has feature flags and a version in each entry."""
    name, dtype = b"a.weight", b"<f4"

    def entry(offset: int) -> bytes:
        head = b"" if version < 5 else struct.pack("<I", 1)
        words = struct.pack("<H", len(name)) + name + b"\0" + struct.pack("<B", len(dtype)) + dtype
        return head + words + struct.pack("<BI3Q", 1, 2, 0, offset, 8)

    flags = (2 if version == 5 else 0).to_bytes(32, "little")
    start = b"|TZR|" + struct.pack("<I32sQ8xQ", version, flags, 0, 1)
    end = len(start) + 8 + len(entry(0))
    return start + struct.pack("<Q", len(entry(0))) + entry(end) + bytes(8)


def read_mistral_params(path: Path) -> object:
    """params.json and the config that follows from it."""
    config, _ = mistral_config(Fields(read_json_object(path), where=str(path)), vocab_rows=40)
    return parse_config(config)


def read_shards(path: Path) -> object:
    """The manifest of save-shards."""
    path.replace(path.with_name(MANIFEST))
    return read_manifest(path.parent)


def read_tokenizer_files(path: Path) -> object:
    """One file as both of a tokenizer's."""
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path.with_name(name).write_bytes(path.read_bytes())
    return read_tokenizer_settings(path.parent)


def read_generation(path: Path) -> object:
    """One file as generation_config.json and as config.json."""
    found = read_json_object(path)
    return defaults_from_configs(found, {"text_config": found, **found}, folder=path.parent)


def read_gguf_tokenizer(path: Path) -> object:
    """What save-shards keeps of a GGUF file's metadata."""
    return gguf_recipe(read_json_object(path), source=str(path))


def read_tekken(path: Path) -> object:
    """tekken.json."""
    return tekken_recipe(path)


def read_tensorizer(path: Path) -> object:
    """A tensorizer file's header."""
    return read_tensorizer_header(path)


def read_cache(path: Path) -> object:
    """A file in the place of npcache's: it is either the cache, or it is written again."""
    root = path.parent / "npcache_model"
    weights = root / "model.safetensors"
    if not weights.exists():
        root.mkdir()
        weights.write_bytes(CACHE)
    checkpoint = open_weights_folder(root, kinds=(SAFETENSORS_KIND,), part=True)
    (cache,) = open_cached(checkpoint).files
    os.replace(path, str(cache))
    found = open_cached(checkpoint)
    expected = {name: (info.shape, info.dtype) for name, info in checkpoint.tensors.items()}
    if {name: (info.shape, info.dtype) for name, info in found.tensors.items()} != expected:
        raise AssertionError(f"the cache {cache} does not hold what the files do")
    return found


def read_options(path: Path) -> object:
    """A text as each option that has a grammar of its own. All are tried; the first refusal is raised at the end."""
    text = path.read_bytes().decode("utf-8", "surrogateescape")
    refusals: list[ValueError] = []
    for parse in (parse_loader_options, parse_source, _size, parse_hub_id, _address):
        try:
            parse(text)
        except ValueError as error:  # OptionError is one; anything else that is one is a fault, and passes on
            if type(error).__name__ != "OptionError":
                raise
            refusals.append(error)
    if len(refusals) == 5:
        raise refusals[0]
    return text


def _size(text: str) -> int:
    return parse_size(text, option="--memory")


def _address(text: str) -> str | None:
    return check_address(text) if is_address(text) else None

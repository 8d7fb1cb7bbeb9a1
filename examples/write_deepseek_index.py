"""DeepSeek-V3's table of tensors as sparse files: 163 files, 91,991 tensors, true names and shapes, few or no numbers.

    python -m examples.write_deepseek_index FOLDER [--numbers]
    firstlayer plan FOLDER --tensor-parallel-size 8 --expert-parallel-size 64

Each file is as long as the true one would be and holds a valid header; its data is a hole, so that the 688 GB take some
12 MB of disk. For measuring what it costs to open, plan and account for a checkpoint of that size. With --numbers
enough is written (0.4 GB) that activations are finite, none of them all zero, and tokens go to different experts:
norms, routers, the first rows of projections, of the embedding table and the head, and of the first experts of each
layer (`Numbers`); see examples/deepseek_share.py. The figures are those of the model's published configuration
(https://huggingface.co/deepseek-ai/DeepSeek-V3/blob/main/config.json).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path

_NBYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
_BLOCK = 128  # rows and columns that share one scale
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class DeepSeek:
    """The sizes that decide the table; the defaults are DeepSeek-V3's."""

    layers: int = 61  # and one more behind them, which predicts the token after next
    dense_layers: int = 3
    experts: int = 256
    shared_experts: int = 1
    experts_per_token: int = 8
    groups: int = 8
    top_groups: int = 4
    hidden: int = 7168
    intermediate: int = 18432
    expert_intermediate: int = 2048
    heads: int = 128
    q_rank: int = 1536
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    vocab: int = 129280
    files: int = 163


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * _NBYTES[self.dtype]


def tensor_table(model: DeepSeek) -> Iterator[Row]:
    """Every tensor in the model's order."""
    yield Row("model.embed_tokens.weight", "BF16", (model.vocab, model.hidden))
    for layer in range(model.layers):
        yield from _layer(model, f"model.layers.{layer}", dense=layer < model.dense_layers)
    yield from _next_token_layer(model, f"model.layers.{model.layers}")
    yield Row("model.norm.weight", "BF16", (model.hidden,))
    yield Row("lm_head.weight", "BF16", (model.vocab, model.hidden))


def _layer(model: DeepSeek, name: str, *, dense: bool) -> Iterator[Row]:
    yield from _attention(model, f"{name}.self_attn")
    if dense:
        yield from _mlp(f"{name}.mlp", model.hidden, model.intermediate)
    else:
        yield Row(f"{name}.mlp.gate.weight", "BF16", (model.experts, model.hidden))
        yield Row(f"{name}.mlp.gate.e_score_correction_bias", "F32", (model.experts,))
        for expert in range(model.experts):
            yield from _mlp(f"{name}.mlp.experts.{expert}", model.hidden, model.expert_intermediate)
        shared = model.expert_intermediate * model.shared_experts
        yield from _mlp(f"{name}.mlp.shared_experts", model.hidden, shared)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield Row(f"{name}.{norm}.weight", "BF16", (model.hidden,))


def _attention(model: DeepSeek, name: str) -> Iterator[Row]:
    yield from _quantized(f"{name}.q_a_proj", model.q_rank, model.hidden)
    yield Row(f"{name}.q_a_layernorm.weight", "BF16", (model.q_rank,))
    yield from _quantized(f"{name}.q_b_proj", model.heads * (model.nope_dim + model.rope_dim), model.q_rank)
    yield from _quantized(f"{name}.kv_a_proj_with_mqa", model.kv_rank + model.rope_dim, model.hidden)
    yield Row(f"{name}.kv_a_layernorm.weight", "BF16", (model.kv_rank,))
    yield from _quantized(f"{name}.kv_b_proj", model.heads * (model.nope_dim + model.value_dim), model.kv_rank)
    yield from _quantized(f"{name}.o_proj", model.hidden, model.heads * model.value_dim)


def _mlp(name: str, hidden: int, intermediate: int) -> Iterator[Row]:
    yield from _quantized(f"{name}.gate_proj", intermediate, hidden)
    yield from _quantized(f"{name}.up_proj", intermediate, hidden)
    yield from _quantized(f"{name}.down_proj", hidden, intermediate)


def _quantized(name: str, rows: int, columns: int) -> Iterator[Row]:
    yield Row(f"{name}.weight", "F8_E4M3", (rows, columns))
    yield Row(f"{name}.weight_scale_inv", "F32", (ceil(rows / _BLOCK), ceil(columns / _BLOCK)))


def _next_token_layer(model: DeepSeek, name: str) -> Iterator[Row]:
    yield Row(f"{name}.embed_tokens.weight", "BF16", (model.vocab, model.hidden))
    for norm in ("enorm", "hnorm"):
        yield Row(f"{name}.{norm}.weight", "BF16", (model.hidden,))
    yield Row(f"{name}.eh_proj.weight", "BF16", (model.hidden, 2 * model.hidden))
    yield from _layer(model, name, dense=False)
    yield Row(f"{name}.shared_head.norm.weight", "BF16", (model.hidden,))
    yield Row(f"{name}.shared_head.head.weight", "BF16", (model.vocab, model.hidden))


@dataclass(frozen=True)
class Numbers:
    """What is written of the tensors' numbers; the rest reads as zeros. Norms are ones and routers random; `rows` of
    the embedding table and the head, and the first `codes_nbytes` of codes of each projection (of an expert those below
    `experts`, all with their scales) are random, and so small that sums stay moderate."""

    experts: int = 4
    rows: int = 64
    codes_nbytes: int = 128 << 10
    seed: int = 0

    def first_bytes(self, row: Row, model: DeepSeek) -> bytes:
        """What is at the beginning of a tensor; b"" where it is a hole. The same for the same seed and name."""
        layer = _LAYER.match(row.name)
        if layer is not None and int(layer[1]) >= model.layers:
            return b""
        source = random.Random(f"{self.seed} {row.name}")
        if row.name.endswith("norm.weight"):
            return struct.pack("<H", 0x3F80) * prod(row.shape)
        if row.name.endswith(".mlp.gate.weight"):
            return _bfloat16(source, row.shape[0] * row.shape[1])
        if row.name in ("model.embed_tokens.weight", "lm_head.weight"):
            return _bfloat16(source, min(self.rows, row.shape[0]) * row.shape[1])
        if row.name.endswith(".e_score_correction_bias"):
            return struct.pack(f"<{row.shape[0]}f", *(source.uniform(0, 0.01) for _ in range(row.shape[0])))
        expert = _EXPERT.search(row.name)
        if expert is not None and int(expert[1]) >= self.experts:
            return b""
        if row.dtype == "F8_E4M3":
            return source.randbytes(min(self.codes_nbytes, row.nbytes)).translate(_CODES)
        return struct.pack("<f", 2.0**-6) * prod(row.shape) if row.name.endswith("_scale_inv") else b""


_CODES = bytes((byte & 0x87) | 0x30 for byte in range(256))  # E4M3: plus or minus 0.5 to 0.94
_HIGH = bytes((byte & 0x80) | 0x3C for byte in range(256))  # upper byte of a bfloat16: plus or minus 0.008 to 0.03


def _bfloat16(source: random.Random, count: int) -> bytes:
    found = bytearray(2 * count)
    found[0::2] = source.randbytes(count)
    found[1::2] = source.randbytes(count).translate(_HIGH)
    return bytes(found)


def write_index(root: Path, model: DeepSeek, *, numbers: Numbers | None = None) -> int:
    """Write the files, the index and a configuration; the number of tensors. `numbers`: None for holes alone."""
    root.mkdir(parents=True, exist_ok=True)
    table = list(tensor_table(model))
    weight_map: dict[str, str] = {}
    for number, rows in enumerate(_cut(table, model.files), 1):
        name = f"model-{number:05}-of-{model.files:06}.safetensors"
        first = {} if numbers is None else {row.name: numbers.first_bytes(row, model) for row in rows}
        _write_file(root / name, rows, first)
        weight_map |= {row.name: name for row in rows}
    metadata = {"total_size": sum(row.nbytes for row in table)}
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    (root / "config.json").write_text(json.dumps(_config(model), indent=2))
    return len(table)


def _cut(table: list[Row], files: int) -> Iterator[list[Row]]:
    """The table in runs of about the same size."""
    total, before = sum(row.nbytes for row in table), 0
    runs: list[list[Row]] = [[] for _ in range(files)]
    for row in table:
        runs[before * files // total].append(row)
        before += row.nbytes
    yield from runs


def _write_file(path: Path, rows: list[Row], first: Mapping[str, bytes]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for row in rows:
        header[row.name] = {"dtype": row.dtype, "shape": row.shape, "data_offsets": [end, end + row.nbytes]}
        end += row.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)  # a hole: nothing is written
        begin = 8 + len(text)
        for row in rows:
            if row.name in first:
                file.seek(begin)
                file.write(first[row.name])
            begin += row.nbytes


def _config(model: DeepSeek) -> dict[str, object]:
    return {
        "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "torch_dtype": "bfloat16",
        "hidden_size": model.hidden, "intermediate_size": model.intermediate, "num_hidden_layers": model.layers,
        "moe_intermediate_size": model.expert_intermediate, "n_routed_experts": model.experts,
        "n_shared_experts": model.shared_experts, "first_k_dense_replace": model.dense_layers,
        "num_attention_heads": model.heads, "num_key_value_heads": model.heads, "q_lora_rank": model.q_rank,
        "kv_lora_rank": model.kv_rank, "qk_nope_head_dim": model.nope_dim, "qk_rope_head_dim": model.rope_dim,
        "v_head_dim": model.value_dim, "vocab_size": model.vocab, "num_nextn_predict_layers": 1,
        "num_experts_per_tok": model.experts_per_token, "n_group": model.groups, "topk_group": model.top_groups,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "moe_layer_freq": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 163_840,
        "rope_theta": 10_000, "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [_BLOCK, _BLOCK]},
    }  # fmt: skip


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--numbers", action="store_true", help="write numbers enough to compute with")
    options = parser.parse_args()
    count = write_index(options.folder, DeepSeek(), numbers=Numbers() if options.numbers else None)
    print(f"{options.folder}: {count} tensors")


if __name__ == "__main__":
    main()

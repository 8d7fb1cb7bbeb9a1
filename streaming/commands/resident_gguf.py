"""A GGUF model's tensors for the resident model that `verify` compares with, by the gguf package's own reader, table of
names and decoders. Nothing of the loading path has a part in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from layers.model_config import ModelConfig
from streaming.checkpoint.gguf_package import gguf_package
from streaming.errors import OptionError

_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_MLP = {"phi3": ("gate_up_proj", "down_proj"), "phi2": ("fc1", "fc2"), "gpt2": ("fc1", "fc2")}
_ATTENTION = {"phi3": ("qkv_proj",), "gpt2": ("qkv_proj",)}
_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    "self_attn.q_norm", "self_attn.k_norm",
)  # fmt: skip
_POSITIONS = "model.layers.0.embed_positions.weight"  # GPT-2's, for which the package's table has another name


def gguf_parts(root: Path, load_format: str) -> list[Path]:
    """All files of the GGUF model; none where the model is no GGUF."""
    if root.is_dir():
        others = any(path.suffix in _OTHER_WEIGHTS for path in root.iterdir())
        files = sorted(path for path in root.glob("*.gguf") if not path.name.startswith("mmproj"))
        return files if load_format == "gguf" or (load_format == "auto" and not others) else []
    if root.suffix != ".gguf":
        return []
    return sorted(root.parent.glob(re.sub(r"-\d{5}-of-", "-?????-of-", root.name))) if "-of-" in root.name else [root]


def open_gguf(parts: Sequence[Path], config: ModelConfig) -> tuple[list[str], Callable[[str], torch.Tensor]]:
    """Names in Hugging Face's spelling, and what gives a tensor in Hugging Face's form."""
    gguf = gguf_package()
    readers = [gguf.GGUFReader(part) for part in parts]
    architecture = str(readers[0].get_field("general.architecture").contents())
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_layers)
    stored = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    if any(reader.endianess == gguf.GGUFEndian.BIG for reader in readers):
        _refuse_blocks(stored)
    by_name = {
        ours: stored[theirs] for ours in _wanted(architecture, config) if (theirs := _name(names, ours)) in stored
    }

    def get_tensor(name: str) -> torch.Tensor:
        tensor = by_name[name]
        shape = [int(size) for size in reversed(tensor.shape)]
        wide = torch.from_numpy(gguf.quants.dequantize(_in_order(tensor), tensor.tensor_type).copy()).view(shape)
        return _as_hub(name, wide, architecture, config)

    return list(by_name), get_tensor


def _refuse_blocks(stored: Mapping[str, Any]) -> None:
    """Of a big-endian file the package turns numbers round, and not the fields inside blocks."""
    for name, tensor in stored.items():
        if tensor.data.dtype.itemsize == 1:
            raise OptionError(
                f"verify reads GGUF a second time by the package gguf, which decodes no {tensor.tensor_type.name} of a "
                f"big-endian file ({name})"
            )


def _in_order(tensor: Any) -> Any:
    """Its numbers in this machine's order: the package's decoder takes them for that."""
    return tensor.data.astype(tensor.data.dtype.newbyteorder("="))


def _as_hub(name: str, wide: torch.Tensor, architecture: str, config: ModelConfig) -> torch.Tensor:
    """What convert_hf_to_gguf.py did to a tensor, undone."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    if architecture in ("llama", "granite") and heads is not None:
        return halves_from_pairs(wide, heads)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return wide - 1
    if architecture == "gpt2" and name.endswith(("_proj.weight", ".fc1.weight", ".fc2.weight")):
        return wide.T.contiguous()
    return wide


def _wanted(architecture: str, config: ModelConfig) -> Iterator[str]:
    attention = _ATTENTION.get(architecture, ("q_proj", "k_proj", "v_proj"))
    mlp = _MLP.get(architecture, ("gate_proj", "up_proj", "down_proj"))
    parts = [
        *(f"self_attn.{part}" for part in (*attention, "o_proj")), *(f"mlp.{part}" for part in mlp), *_NORMS,
    ]  # fmt: skip
    blocks = [f"model.layers.{i}.{part}" for i in range(config.num_layers) for part in parts]
    for module in ("model.embed_tokens", "model.norm", "lm_head", *blocks):
        yield f"{module}.weight"
        yield f"{module}.bias"
    yield _POSITIONS


def _name(names: Any, ours: str) -> str | None:
    if ours == _POSITIONS:
        return "position_embd.weight"
    found: str | None = names.get_name(ours, try_suffixes=(".weight", ".bias"))
    return found


def halves_from_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rotary pairs lie side by side in some files (rows 0, 1 of a head); here they lie half a head apart."""
    rows = weight.shape[0] // heads
    return weight.view(heads, rows // 2, 2, -1).transpose(1, 2).reshape(weight.shape)

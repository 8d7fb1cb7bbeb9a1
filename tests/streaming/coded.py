"""Checkpoints that are quantized on disk: tiny models whose linear weights are replaced by tensors of a form."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from examples.write_tiny_model import TinyModel, write_tiny_model
from streaming import LLM

Tensors = dict[str, torch.Tensor]
Encode = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor] | None]
"""(module, wide weight) -> (tensors by leaf, the wide float32 weight that they stand for), or None: it stays wide."""


def write_coded(
    folder: Path, encode: Encode, *, config: Mapping[str, Any], model: TinyModel | None = None
) -> tuple[Path, Path]:
    """Two folders: the quantized model, and its twin with the wide float32 weights that the first one stands for."""
    model = model or TinyModel(layers=2)
    original = write_tiny_model(folder / "original", model=model)
    wide: Tensors = {}
    for file in sorted(original.glob("*.safetensors")):
        wide |= load_file(file)
    coded, twin = dict(wide), {name: tensor.float() for name, tensor in wide.items()}
    for name, tensor in wide.items():
        module, _, leaf = name.rpartition(".")
        made = encode(module, tensor) if leaf == "weight" and tensor.dim() == 2 and "proj" in module else None
        if made is not None:
            del coded[name]
            coded |= {f"{module}.{leaf}": part.contiguous() for leaf, part in made[0].items()}
            twin[name] = made[1].float()
    return _write(original, folder / "coded", coded, config), _write(original, folder / "twin", twin, None)


def _write(original: Path, folder: Path, tensors: Tensors, config: Mapping[str, Any] | None) -> Path:
    folder.mkdir()
    raw = json.loads((original / "config.json").read_text(encoding="utf-8"))
    if config is not None:
        raw["quantization_config"] = dict(config)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def logits_of(folder: Path, ids: list[int], **options: Any) -> torch.Tensor:
    """float32 logits [len(ids), vocab] in exact kernels: what is compared is the weights."""
    with LLM(str(folder), dtype="float32", kernels="exact", **options) as llm:
        return llm.logits(ids).clone()
